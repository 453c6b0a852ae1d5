"""Memory figures of torch.cuda and torch.accelerator: the simulated allocator's own, to the byte."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from mindspeed_swap.sim import device as sim_device
from mindspeed_swap.sim.device import max_memory_allocated, memory_allocated, reset_peak
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


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = sim_device.capacity()
    return max(0, total - memory_allocated()), total


def _memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The keys of a CUDA build. No block is cached or rounded, so reserved, active and requested equal allocated."""
    now, peak = memory_allocated(), max_memory_allocated()
    stats = dict.fromkeys(_STAT_KEYS, 0)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        for pool in ("all", "large_pool"):
            stats[f"{kind}.{pool}.current"], stats[f"{kind}.{pool}.peak"] = now, peak
    stats["num_ooms"] = sim_device.stats()["ooms"]
    return OrderedDict(sorted(stats.items()))


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    now, peak = memory_allocated(), max_memory_allocated()
    return f"simulated device: {now} bytes allocated, at most {peak}, of {sim_device.capacity()}"


def redirect() -> None:
    """Patch torch.cuda's and torch.accelerator's figures, and the recording of their history, which there is not."""
    both: dict[str, Any] = {
        "memory_allocated": memory_allocated,
        "max_memory_allocated": max_memory_allocated,
        "memory_reserved": memory_allocated,
        "max_memory_reserved": max_memory_allocated,
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": reset_peak,
    }
    functions: dict[str, Any] = {
        "memory_cached": memory_allocated,
        "max_memory_cached": max_memory_allocated,
        "device_memory_used": memory_allocated,
        "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak,
        "mem_get_info": mem_get_info,
        "memory_summary": _memory_summary,
        "memory_snapshot": lambda *args, **kwargs: [],
        "get_per_process_memory_fraction": constant(1.0),
        "get_allocator_backend": constant("native"),
        "host_memory_stats": lambda: OrderedDict(),
    }
    for holder in (torch.cuda, torch.cuda.memory):
        replace(holder, **both, **functions)
    replace(
        torch.cuda.memory,
        _record_memory_history=constant(None),
        _snapshot=lambda *args, **kwargs: {"segments": [], "device_traces": []},
        _dump_snapshot=constant(None),
    )
    nothing = {"empty_cache": constant(None), "reset_accumulated_memory_stats": constant(None)}
    for holder in (torch.accelerator, torch.accelerator.memory):
        replace(holder, **both, **nothing, get_memory_info=mem_get_info)
