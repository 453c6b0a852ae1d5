"""What the tests of the lane share: the accelerator, the fake runtime's controls, tensors of known bytes."""
from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from mindspeed_swap.core.accelerator.npu import NpuAccelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.waits import Wait
from mindspeed_swap.units import MIB

CAPACITY = 96 * MIB
UNIT = 12 * MIB - 4096  # a segment of its own: torch_npu adds 32 bytes, and rounds to 2 MiB from 10 MiB on
NUMBERS = 512 << 10  # of fp32: 2 MiB
SLOW = 0.004  # 10^9 bytes per second: 2 MiB take half a second, so that a busy host is faster all the same
fake = ctypes.CDLL("libascendcl.so")
fake.fakecann_set_link.argtypes = [ctypes.c_double, ctypes.c_double]
fake.fakecann_set_kernel_ms.argtypes = [ctypes.c_double]
for name in ("used_bytes", "failed_mallocs", "refused_copies", "swapped_operands", "swapped_blocks"):
    getattr(fake, f"fakecann_{name}").restype = ctypes.c_size_t
COUNTERS = {name: getattr(fake, f"fakecann_{name}") for name in ("refused_copies", "swapped_operands")}


@contextmanager
def device(capacity: int = CAPACITY, hook: str = "1") -> Iterator[NpuAccelerator]:
    """An accelerator that may use ``capacity`` bytes; the device is empty and fast before and after."""
    empty_device()
    settings = {"MINDSPEED_SWAP_DEVICE_CAPACITY": str(capacity), "MINDSPEED_SWAP_OOM_HOOK": hook}
    with mock.patch.dict(os.environ, settings):
        accelerator = NpuAccelerator()
    try:
        yield accelerator
    finally:
        accelerator.on_pressure(None)
        accelerator.close()
        empty_device()
        torch.npu.set_per_process_memory_fraction(1.0)


def empty_device() -> None:
    fake.fakecann_set_link(0, 0)
    fake.fakecann_set_kernel_ms(0)
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()


def marked(nbytes: int, mark: int) -> torch.Tensor:
    """``nbytes`` on the device, all of value ``mark``."""
    return torch.empty(nbytes, dtype=torch.uint8, device="npu").fill_(mark)


def holds(tensor: torch.Tensor, mark: int) -> bool:
    return bool((tensor.cpu() == mark).all())


def content(seed: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.float32) + seed * NUMBERS


def on_device(seed: int) -> torch.Tensor:
    return content(seed).npu()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().cpu(), b.detach().cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


@contextmanager
def manager_of(
    accelerator: NpuAccelerator, skip: frozenset[Wait] = frozenset(), host_bytes: int = 64 * MIB
) -> Iterator[SwapManager]:
    pool = HostPool(accelerator, host_bytes)
    first = pool.alloc(4 * NUMBERS)
    first.tensor.fill_(255)  # else what is there may be what an earlier test left, and right by chance
    pool.free(first)
    manager = SwapManager(accelerator, pool, min_bytes=1024, skip_waits=skip)
    try:
        yield manager
    finally:
        fake.fakecann_set_link(0, 0)
        manager.close()
        pool.close()
