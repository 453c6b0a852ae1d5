"""The simulated device: part of this process's CPU memory, counted and limited as a device's would be.

After ``install`` whatever torch allocates on the CPU is *device* memory, except inside ``host_memory()``. All else is
host memory: what that scope allocates, numpy and mmap memory, and tensors made before the install. A host tensor that
grows by ``resize_`` outside the scope becomes device memory. Forked children have host memory only.

Settings, read at the install:
    MINDSPEED_SWAP_DEVICE_CAPACITY   bytes of device memory (``600MiB``); unset: the machine's memory
    MINDSPEED_SWAP_SIM_LINK_GBPS     speed of the link, in 10^9 bytes per second and direction; unset: 16
"""
from __future__ import annotations

import atexit
import math
import os
from contextlib import AbstractContextManager
from types import ModuleType

import torch

from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import parse_bytes

CAPACITY_VARIABLE = "MINDSPEED_SWAP_DEVICE_CAPACITY"
LINK_VARIABLE = "MINDSPEED_SWAP_SIM_LINK_GBPS"
DEFAULT_LINK_GBPS = 16.0  # PCIe gen 4 x8: slow enough to matter beside CPU compute, fast enough for tests

# On a storage's Python object, which torch keeps as long as the storage lives.
_MAPPED = "_simulated_mapped"

_extension: ModuleType | None = None


def install(capacity_bytes: int | None = None) -> None:
    """Make this process's new CPU tensors device memory. Again: only sets the capacity, if one is given.

    ``capacity_bytes`` None: what the environment says. Raises SettingError on a bad setting, before anything is built.
    """
    global _extension
    if _extension is not None and _extension.installed():
        if capacity_bytes is not None:
            set_capacity(capacity_bytes)
        return
    capacity_bytes = capacity_from_environment() if capacity_bytes is None else _checked_capacity(capacity_bytes)
    link_gbps = link_from_environment()
    if _extension is None:
        from mindspeed_swap.core.extension import load_extension

        _extension = load_extension("mindspeed_swap_sim", ["sim_device.cpp"], headers=["sim_copy_engine.h"])
        atexit.register(_extension.shutdown, final=True)
    _extension.set_capacity(capacity_bytes)
    set_link(link_gbps, link_gbps)
    _extension.install()
    reset_peak()


def uninstall() -> None:
    """Give new tensors back to torch's own allocator. Device tensors that live go on living, and stay device memory."""
    if _extension is not None:
        _extension.uninstall()


def installed() -> bool:
    return _extension is not None and _extension.installed()


def extension() -> ModuleType:
    """The C++ module. RuntimeError before the first install."""
    if _extension is None:
        raise RuntimeError("the simulated device is not installed: call mindspeed_swap.sim.device.install()")
    return _extension


# ---- whose memory
def host_memory() -> AbstractContextManager[None]:
    """Scope, of this thread, in which torch allocates host memory: neither counted nor limited."""
    return extension().Scope(host=True)


def device_memory() -> AbstractContextManager[None]:
    """Scope, of this thread, in which torch allocates device memory even inside ``host_memory()``."""
    return extension().Scope(host=False)


def is_device(tensor: torch.Tensor) -> bool:
    """True if the tensor's storage is a live block of the device, or mapped, or has no bytes. Never raises."""
    return _extension is not None and (_extension.owns(tensor) or _is_mapped(tensor))


def mark_mapped(tensor: torch.Tensor) -> None:
    """From now on its storage, which is host memory, counts as memory that the device has mapped: a device tensor to
    all who ask, but none of the device's bytes."""
    setattr(tensor.untyped_storage(), _MAPPED, True)


def _is_mapped(tensor: torch.Tensor) -> bool:
    try:
        return bool(getattr(tensor.untyped_storage(), _MAPPED, False))
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return False


# ---- figures, in bytes. (``device``: as torch.cuda's functions of these names have it; there is one.)
def memory_allocated(device: object = None) -> int:
    return extension().allocated()


def max_memory_allocated(device: object = None) -> int:
    return extension().peak()


def reset_peak(device: object = None) -> None:
    extension().reset_peak()


def capacity() -> int:
    return extension().capacity()


def set_capacity(nbytes: int) -> None:
    """May be less than what is in use: then only frees succeed until it is."""
    extension().set_capacity(_checked_capacity(nbytes))


def set_link(d2h_gbps: float, h2d_gbps: float) -> None:
    """Speed of the link in 10^9 bytes per second for each direction; 0: as fast as memory."""
    module = extension()
    module.set_bandwidth(module.LINK_D2H, d2h_gbps * 1e9)
    module.set_bandwidth(module.LINK_H2D, h2d_gbps * 1e9)


def stats() -> dict[str, int]:
    """Counters since the process began: memory, requests, pressure, copies, and what was done wrong.

    ``freed_under_copy``: blocks freed, or host ranges unregistered, while a queued copy still needed them;
    ``late_writes``: those of the blocks into which a copy was still to write.
    """
    return extension().stats()


def synchronize() -> None:
    """Blocks until every queued copy is done. Compute is always done."""
    extension().synchronize()


# ---- settings
def capacity_from_environment() -> int:
    text = os.environ.get(CAPACITY_VARIABLE)
    if text is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return parse_bytes(text, CAPACITY_VARIABLE)


def link_from_environment() -> float:
    """In 10^9 bytes per second."""
    text = os.environ.get(LINK_VARIABLE)
    if text is None:
        return DEFAULT_LINK_GBPS
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise SettingError(f"{LINK_VARIABLE}={text!r}: expected a number above 0, in 10^9 bytes per second, such as 16")
    return value


def _checked_capacity(nbytes: int) -> int:
    if nbytes <= 0:
        raise SettingError(f"the capacity of the simulated device must be above 0 bytes, not {nbytes}")
    return nbytes
