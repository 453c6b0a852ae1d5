"""Ascend NPUs: torch_npu's native caching allocator, NPU streams and events.

Importing this module imports no torch_npu; ``NpuAccelerator()`` does. What differs from CUDA:
  * torch_npu's copies are asynchronous only for page-locked memory that its runtime knows. Such memory comes from
    torch's pinned allocator; pages of our own cannot be registered for it.
  * Device tensors over host memory are made by ``torch_npu.empty_with_swapped_memory``. The driver refuses to copy
    them; only kernels read and write them. So they are copied by a multiplication by one, of their bits as integers:
    a multiplication of floats may change a NaN and flush what is denormal.
  * A tensor may be kept in a private layout (NZ) in which its storage is not what its strides say.
"""
from __future__ import annotations

import importlib
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import INTEGERS
from mindspeed_swap.core.accelerator.torch_device import TorchAccelerator
from mindspeed_swap.core.extension import load_extension
from mindspeed_swap.core.movable import StorageSet
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.npu_versions import unusable
from mindspeed_swap.units import format_bytes

BASE_FORMATS = frozenset({0, 1, 2, 30})  # NCHW, NHWC, ND, NCDHW: the storage is what sizes and strides say
# torch_npu's map of swapped memory has no lock of its own.
_swapped_memory_lock = threading.Lock()


def _torch_npu() -> Any:
    """The module. Raises SettingError, naming what is needed and what was found, if it cannot be used."""
    try:
        module = importlib.import_module("torch_npu")
    except Exception as error:  # no CANN: ImportError of a library; another torch: undefined symbols, or its own error
        raise unusable("torch_npu cannot be loaded", error) from error
    if module.npu.device_count() == 0:
        raise unusable("no NPU found", "see npu-smi info, and ASCEND_RT_VISIBLE_DEVICES")
    return module


def check_npu(asked_by: str = "mindspeed_swap") -> Any:
    """torch_npu, if it can be used and has its native caching allocator. Creates no context. Raises SettingError.

    ``asked_by`` names the setting that needs it, for the message.
    """
    module = _torch_npu()
    missing = [name for name in ("mem_get_info", "get_per_process_memory_fraction") if not hasattr(module.npu, name)]
    missing += [name for name in ("_npu_getCurrentStream", "_npu_setStream") if not hasattr(module._C, name)]
    if missing:
        raise unusable(f"torch_npu lacks {', '.join(missing)}", "it is too old, or changed")
    if module.npu.get_allocator_backend() != "native":
        raise SettingError(
            f"{asked_by} cannot be used with a pluggable NPU allocator (MindSpeed's --memory-fragmentation and its own "
            "--smart-swap install one, unless import mindspeed_swap.megatron_adaptor comes before import "
            "mindspeed.megatron_adaptor): it needs torch_npu's native caching allocator"
        )
    if os.environ.get("PYTORCH_NO_NPU_MEMORY_CACHING"):
        raise SettingError(
            f"{asked_by} cannot be used with PYTORCH_NO_NPU_MEMORY_CACHING, which switches the caching allocator off: "
            "unset it"
        )
    return module


class NpuAccelerator(TorchAccelerator):
    """The current NPU of this process. One per process."""

    name = "npu"
    kernels_use_host_memory_best = True
    has_swapped_memory = True

    def __init__(self) -> None:
        """Raises SettingError for no usable NPU, a foreign allocator, or a capacity that the device does not have."""
        self._torch_npu = check_npu()
        npu, inner = self._torch_npu.npu, self._torch_npu._C
        npu.init()
        self._swapped = StorageSet()
        self.passed_formats: Counter[int] = Counter()  # layouts that are no base format -> tensors passed through
        super().__init__(npu, self._build_guard, inner._npu_getCurrentStream, inner._npu_setStream)

    def _build_guard(self) -> Any:
        package = Path(self._torch_npu.__file__).parent
        include = package / "include"
        return load_extension(
            "mindspeed_swap_oom_guard_npu",
            ["oom_guard.cpp"],
            # Its version is among what a build depends on; its headers use what torch has deprecated.
            cflags=["-DSWAP_NPU", f'-DTORCH_NPU="{self._torch_npu.__version__}"', "-Wno-deprecated-declarations"],
            ldflags=[f"-L{package / 'lib'}", "-ltorch_npu"],
            include_dirs=[include, include / "third_party/acl/inc", include / "third_party/hccl/inc"],
        )

    # ---- whose memory
    def owns(self, tensor: torch.Tensor) -> bool:
        if not super().owns(tensor) or tensor.untyped_storage() in self._swapped:
            return False
        layout = int(self._torch_npu.get_npu_format(tensor))
        if layout in BASE_FORMATS:
            return True
        if not self.passed_formats:
            say(
                f"npu: a tensor in NPU-internal format {layout} stays on the device, as all such do; "
                "torch.npu.config.allow_internal_format = False avoids them",
                every_rank=True,
            )
        self.passed_formats[layout] += 1
        return False

    # ---- bytes
    def slab_bytes(self, nbytes: int) -> int:
        # Torch's pinned allocator takes the next power of two.
        return 1 << (nbytes - 1).bit_length() if nbytes else 0

    def page_locked(self, nbytes: int) -> torch.Tensor:
        # What earlier slabs left in torch's cache of pinned memory would count twice.
        self._torch_npu.npu.host_empty_cache()
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register_host(self, address: int, nbytes: int) -> None:
        raise NotImplementedError("npu: host memory comes page-locked from page_locked()")

    def unregister_host(self, address: int) -> None:
        """Torch frees it with the last tensor over it."""

    def swapped_memory(self, nbytes: int) -> torch.Tensor:
        make = getattr(self._torch_npu, "empty_with_swapped_memory", None)
        if make is None:
            raise unusable("torch_npu has no empty_with_swapped_memory", "it is too old")
        with _swapped_memory_lock, torch.inference_mode(False):
            self._swapped.drop_dead()
            try:
                tensor: torch.Tensor = make([nbytes], dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise MemoryError(f"no swapped memory of {format_bytes(nbytes)}: {reason}") from error
            self._swapped.add(tensor)
        return tensor

    def write_mapped(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if src.device != dst.device or src.dtype != dst.dtype:
            src = src.to(dst.device, dst.dtype)
        self._multiply(dst, src)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage() in self._swapped:
            plain = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._multiply(plain, tensor)
            tensor = plain
        return super().host_copy(tensor)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.untyped_storage() in self._swapped or src.untyped_storage() in self._swapped:
            in_words = (dst.numel() | dst.data_ptr() | src.data_ptr()) % 4 == 0
            words = torch.int32 if in_words else torch.uint8
            self._multiply(dst.view(words), src.view(words))
        else:
            super()._move(dst, src)

    @staticmethod
    def _multiply(dst: torch.Tensor, src: torch.Tensor) -> None:
        """The bits of ``src``, by kernels only."""
        integer = INTEGERS[src.itemsize]
        dst.view(integer).fill_(1).mul_(src.view(integer))

    def close(self) -> None:
        if self.passed_formats:
            counts = ", ".join(f"{count} in format {layout}" for layout, count in self.passed_formats.items())
            say(f"npu: tensors passed through for their internal format: {counts}", every_rank=True)
            self.passed_formats.clear()
        super().close()
