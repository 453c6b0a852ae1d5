"""What the tests of this folder share: a small device, and tensors whose bytes can be checked.

They run on a GPU and, where they need no kernel, also on the runtime of ``tests/core/fake_cudart.cpp``.
"""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from mindspeed_swap.core.accelerator import cuda
from mindspeed_swap.core.accelerator.torch_device import CAPACITY as CAPACITY_VARIABLE
from mindspeed_swap.core.accelerator.watch import OOM_HOOK
from mindspeed_swap.units import MIB

FAKE = "FAKE_CUDA_CAPACITY" in os.environ
GPUS = torch._C._cuda_getDeviceCount() if hasattr(torch._C, "_cuda_getDeviceCount") else 0
CAPACITY = 240 * MIB if FAKE else 2048 * MIB
UNIT = CAPACITY // 12 // (2 * MIB) * (2 * MIB)  # of the allocator's granularity for large blocks
HOOK_OFF = os.environ.get(OOM_HOOK) == "0"

needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no GPU")
needs_kernels = pytest.mark.skipif(FAKE, reason="the fake runtime has no kernels")
needs_hook = pytest.mark.skipif(HOOK_OFF, reason=f"{OOM_HOOK}=0")


@contextmanager
def small_device(capacity: int = CAPACITY) -> Iterator[cuda.CudaAccelerator]:
    """A CudaAccelerator that may use ``capacity`` bytes; the device is empty before and after."""
    _empty()
    with mock.patch.dict(os.environ, {CAPACITY_VARIABLE: str(capacity)}):
        accelerator = cuda.CudaAccelerator()
    try:
        yield accelerator
    finally:
        accelerator.on_pressure(None)
        accelerator.close()
        _empty()
        torch.cuda.set_per_process_memory_fraction(1.0)


def _empty() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def marked(nbytes: int, mark: int) -> torch.Tensor:
    """``nbytes`` on the device, all of value ``mark``; written by a copy, as there may be no kernels."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    tensor.copy_(torch.full((nbytes,), mark % 251, dtype=torch.uint8))
    return tensor


def holds(tensor: torch.Tensor, mark: int) -> bool:
    return bool((tensor.cpu() == mark % 251).all())


class Evictor:
    """A pressure handler that copies kept tensors to the host, oldest first, until ``nbytes`` are free."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.on_host: list[torch.Tensor] = []
        self.calls: list[tuple[int, int]] = []

    def __call__(self, nbytes: int, attempt: int) -> bool:
        self.calls.append((nbytes, attempt))
        freed = 0
        while self.kept and freed < nbytes:
            tensor = self.kept.pop(0)
            self.on_host.append(tensor.cpu())
            freed += tensor.numel()
            del tensor
        return freed > 0
