"""NVIDIA GPUs: torch's native caching allocator, CUDA streams and events.

Importing this module touches no device; ``CudaAccelerator()`` does.
"""
from __future__ import annotations

import ctypes
import os
import sysconfig
from collections import deque
from pathlib import Path
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Bytes
from mindspeed_swap.core.accelerator.torch_device import TorchAccelerator
from mindspeed_swap.core.extension import load_extension
from mindspeed_swap.core.pcie import pcie_link_bytes_per_ms
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.units import format_bytes

# What a kernel reads back past the copy engines, and how many of these are kept until it has surely run.
MOST_SMALL_BYTES, SMALL_KEPT = 64 << 10, 256

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def check_allocator(asked_by: str = "mindspeed_swap") -> None:
    """Raises SettingError if torch does not use its native caching allocator. Creates no CUDA context.

    ``asked_by`` names the setting that needs the allocator, for the message.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend == "cudaMallocAsync":
        raise SettingError(
            f"{asked_by} cannot be used with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: it needs torch's native "
            "caching allocator. Remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF)"
        )
    if backend != "native":
        raise SettingError(
            f"{asked_by} cannot be used with a pluggable allocator (torch.cuda.memory.change_current_allocator made it "
            f"{backend!r}; MindSpeed's memory-fragmentation option does that): it needs torch's native caching "
            "allocator. Remove one of the two"
        )
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise SettingError(
            f"{asked_by} cannot be used with PYTORCH_NO_CUDA_MEMORY_CACHING, which switches torch's caching allocator "
            "off: unset it"
        )


def prepare_allocator(asked_by: str) -> None:
    """Check the allocator, and let it use expandable segments unless the user has set it up.

    Swapping frees and allocates large blocks in an order that plain segments answer with fragments: memory that is
    reserved, free, and in no piece large enough. Raises SettingError. Creates no CUDA context.
    """
    check_allocator(asked_by)
    if not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        # The newer name is the one without a deprecation warning.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
        say(f"expandable segments switched on for {asked_by}; set PYTORCH_CUDA_ALLOC_CONF to decide for yourself")


class CudaAccelerator(TorchAccelerator):
    """The current CUDA device of this process. One per process."""

    name = "cuda"

    def __init__(self) -> None:
        """Raises SettingError for no device, a foreign allocator, or a capacity that the device does not have."""
        check_allocator()
        # Not is_available(): under torch_npu's transfer_to_npu that speaks for the NPU.
        if torch.cuda.device_count() == 0:
            raise SettingError(
                "no CUDA device is available to this process: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or train on "
                "the simulated device"
            )
        torch.cuda.init()
        super().__init__(torch.cuda, _build_guard, torch._C._cuda_getCurrentStream, torch._C._cuda_setStream)
        self._memcpy = _memcpy()
        self._small: deque[torch.Tensor] = deque(maxlen=SMALL_KEPT)
        self._cycles_per_ms: float | None = None

    def record(self, stream: Any) -> Any:
        # What torch.cuda.Event is in C++: its Python methods cost as much as the calls.
        event = torch._C._CudaEventBase(enable_timing=True)
        event.record(stream)
        return event

    def copy(self, dst: Bytes, src: Bytes, stream: Any) -> None:
        # What `copy_` comes down to, at a third of its host time. Raises RuntimeError.
        if self._memcpy is None:
            super().copy(dst, src, stream)
            return
        nbytes = _length(dst)
        if _length(src) != nbytes:
            raise RuntimeError(f"a copy of {_length(src)} bytes to {nbytes}")
        code = self._memcpy(dst.data_ptr(), src.data_ptr(), nbytes, _EITHER_WAY, stream.cuda_stream)
        if code:
            _check(code, f"cudaMemcpyAsync of {format_bytes(nbytes)}")

    def occupy(self, ms: float) -> None:
        if self._cycles_per_ms is None:
            self._cycles_per_ms = rate = self._measured_cycles_per_ms()
            # A device that has rested takes a while to raise its clock: as it is then is not as it is in a step.
            for _ in range(_MOST_MEASURED):
                rate, before = self._measured_cycles_per_ms(), rate
                self._cycles_per_ms = max(self._cycles_per_ms, rate)
                if rate <= before * (1 + _SAME_CLOCK_SHARE):
                    break
        torch.cuda._sleep(int(ms * self._cycles_per_ms))

    def _measured_cycles_per_ms(self) -> float:
        stream = self.compute_stream()
        before = self.record(stream)
        torch.cuda._sleep(_MEASURED_CYCLES)
        after = self.record(stream)
        after.synchronize()
        elapsed = self.elapsed_ms(before, after)
        return _MEASURED_CYCLES / elapsed if elapsed > 0 else 0.0

    def register_host(self, address: int, nbytes: int) -> None:
        """Raises RuntimeError if the driver refuses, for example beyond the limit on locked memory."""
        code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        _check(code, f"cudaHostRegister of {format_bytes(nbytes)} of host memory at {address:#x}")

    def unregister_host(self, address: int) -> None:
        """Raises RuntimeError if the memory was not registered."""
        code = torch.cuda.cudart().cudaHostUnregister(address)
        _check(code, f"cudaHostUnregister of host memory at {address:#x}")

    def map_host(self, host: torch.Tensor) -> torch.Tensor:
        # Registered memory has the same address on the device (unified addressing), so kernels need no other pointer.
        tensor = torch.as_tensor(_MappedHost(host), device=self._device)
        if tensor.data_ptr() != host.data_ptr():  # torch has made a copy elsewhere, which nobody would ever see
            raise RuntimeError(f"{self._device} cannot use host memory at {host.data_ptr():#x} in place")
        return tensor

    def read_small(self, tensor: torch.Tensor) -> torch.Tensor | None:
        nbytes = tensor.numel() * tensor.itemsize
        small = 0 < nbytes <= MOST_SMALL_BYTES and tensor.dtype in (torch.int32, torch.int64)
        if not small or tensor.device != self._device:
            return None
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._small.append(host)  # pinned memory is handed out again as soon as it is dropped, read or not
        try:
            mapped = self.map_host(host)
        except RuntimeError:  # page-locked for another device
            return None
        # Not ``copy_``: between two addresses that is the copy engine's.
        torch.add(tensor.detach(), 0, out=mapped.view(tensor.dtype).view(tensor.shape))
        return host.view(tensor.dtype).view(tensor.shape)

    def link_limit_bytes_per_ms(self) -> float | None:
        # NVML knows the device by this, whatever CUDA_VISIBLE_DEVICES renumbers.
        return pcie_link_bytes_per_ms(f"GPU-{torch.cuda.get_device_properties(self._index).uuid}")


class _MappedHost:
    """What torch asks of foreign device memory. It keeps this object, and so the memory, as long as the tensor."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._host.numel(),), "typestr": "|u1", "data": (self._host.data_ptr(), False), "version": 2}


_MEASURED_CYCLES = 2_000_000  # about a millisecond
_MOST_MEASURED, _SAME_CLOCK_SHARE = 20, 0.02

# cudaMemcpyDefault: addresses tell which of them is the device's.
_EITHER_WAY = 4


def _memcpy() -> Any:
    """``cudaMemcpyAsync(to, from, bytes, kind, stream)`` of the runtime that torch has loaded. None: not to be found,
    as where torch was linked with it statically."""
    function = getattr(ctypes.CDLL(None), "cudaMemcpyAsync", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return function


def _length(memory: Bytes) -> int:
    return memory.numel() if isinstance(memory, torch.Tensor) else len(memory)  # len of a tensor takes 2 us


def _check(code: Any, what: str) -> None:
    runtime = torch.cuda.cudart()
    code = runtime.cudaError(code)
    if code == runtime.cudaError.success:
        return
    # The runtime remembers the error for this thread, and torch would report it at its next kernel launch.
    forget = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    if forget is not None:
        forget()
    raise RuntimeError(f"{what} failed: {runtime.cudaGetErrorString(code)} (CUDA error {int(code)})")


def _build_guard() -> Any:
    return load_extension(
        "mindspeed_swap_oom_guard_cuda",
        ["oom_guard.cpp"],
        ldflags=[f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10_cuda"],
        include_dirs=_cuda_include_dirs(),
    )


def _cuda_include_dirs() -> list[str]:
    """Where cuda_runtime.h may be: a toolkit if there is one, else the wheels that come with torch.

    The runtime's wheel leaves out the folder ``crt``; triton, which torch brings too, has it.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    major = (torch.version.cuda or "").split(".")[0]
    candidates = [
        *(Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)),
        packages / "nvidia" / f"cu{major}" / "include",  # CUDA 13 and later
        packages / "nvidia" / "cuda_runtime" / "include",  # CUDA 12
        Path("/usr/local/cuda/include"),
        packages / "triton" / "backends" / "nvidia" / "include",
    ]
    return [str(folder) for folder in candidates if (folder / "cuda_runtime.h").is_file()]
