"""Memory figures of torch.cuda and torch.accelerator: the simulated allocator's own, to the byte."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from mindspeed_swap.sim import device as sim_device
from mindspeed_swap.sim.patching import constant, replace

_STATISTICS = ("allocation", "segment", "active", "inactive_split")
_STATISTICS_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_STAT_KEYS = _EVENTS + tuple(
    f"{statistic}.{pool}.{metric}"
    for statistic in _STATISTICS + _STATISTICS_BYTES
    for pool in ("all", "large_pool", "small_pool")
    for metric in ("current", "peak", "allocated", "freed")
)


def _allocated(device: Any = None) -> int:
    return sim_device.memory_allocated()


def _max_allocated(device: Any = None) -> int:
    return sim_device.max_memory_allocated()


def _reset_peak(device: Any = None) -> None:
    sim_device.reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = sim_device.capacity()
    return max(0, total - _allocated()), total


def _memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The keys of a CUDA build. No block is cached or rounded, so reserved, active and requested equal allocated."""
    now, peak = _allocated(), _max_allocated()
    stats = dict.fromkeys(_STAT_KEYS, 0)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        for pool in ("all", "large_pool"):
            stats[f"{kind}.{pool}.current"], stats[f"{kind}.{pool}.peak"] = now, peak
    stats["num_ooms"] = sim_device.stats()["ooms"]
    return OrderedDict(sorted(stats.items()))


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"simulated device: {_allocated()} bytes allocated, at most {_max_allocated()}, of {sim_device.capacity()}"


def redirect() -> None:
    """Patch torch.cuda's and torch.accelerator's figures, and the recording of their history, which there is not."""
    functions: dict[str, Any] = {
        "memory_allocated": _allocated,
        "max_memory_allocated": _max_allocated,
        "memory_reserved": _allocated,
        "max_memory_reserved": _max_allocated,
        "memory_cached": _allocated,
        "max_memory_cached": _max_allocated,
        "device_memory_used": _allocated,
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "reset_max_memory_cached": _reset_peak,
        "mem_get_info": mem_get_info,
        "memory_stats": _memory_stats,
        "memory_summary": _memory_summary,
        "memory_snapshot": lambda *args, **kwargs: [],
        "get_per_process_memory_fraction": constant(1.0),
        "get_allocator_backend": constant("native"),
        "host_memory_stats": lambda: OrderedDict(),
    }
    for holder in (torch.cuda, torch.cuda.memory):
        replace(holder, **functions)
    replace(
        torch.cuda.memory,
        _record_memory_history=constant(None),
        _snapshot=lambda *args, **kwargs: {"segments": [], "device_traces": []},
        _dump_snapshot=constant(None),
    )
    neutral: dict[str, Any] = {
        "empty_cache": constant(None),
        "memory_stats": _memory_stats,
        "memory_allocated": _allocated,
        "max_memory_allocated": _max_allocated,
        "memory_reserved": _allocated,
        "max_memory_reserved": _max_allocated,
        "reset_accumulated_memory_stats": constant(None),
        "reset_peak_memory_stats": _reset_peak,
        "get_memory_info": mem_get_info,
    }
    for holder in (torch.accelerator, torch.accelerator.memory):
        replace(holder, **neutral)
