"""``rank<N>/summary.json``: one rank's figures. Sizes in bytes, times in milliseconds, null: not known.

=================  ================================================================================================
field              meaning
=================  ================================================================================================
version            of this schema
run_id             the same on all ranks of a run; files with different ones are of different runs
rank, world_size   which of how many
versions           of mindspeed_swap, torch, python and megatron-core
device, layout     kind of device; the arguments that decide what a step saves
feature            that makes the plans: smart-swap, adaptive memory or swap-config; null: none
phase, steps       WarmUp, SearchPolicy or Stable (off: no feature makes plans); training steps so far
capacity_bytes     what this process may use of the device
target_bytes       peak that plans must stay under
peak_bytes         predicted peak of a step that swaps nothing
floor_bytes        memory to count on; ``floor`` has its parts, and as reachable_bytes what no plan goes below
plan               the one in force: bytes, number of tensors, and what was predicted of it before it ran
warm_up            the recorded step that the first plan was made from: evictions and waits in it, what could move
tries              every plan that SearchPolicy ran: bytes, trouble (evictions, loads that were not prefetched,
                   prefetches without room), measured peak and step time, the same as predicted, bytes above the target
stable             counters since Stable began
swap_config        of --swap-config: lines about values that are too small or too large, and about what of the setting
                   had no effect. null: off
virtual_optimizer  of --virtual-optimizer: mode, pipeline stage, bytes asked for (null: all) and moved; of the last
                   step, bytes that came in before the optimizer's step and that left after it. null: off
host               budget, pinned and most used bytes of host memory for swapped tensors
step               one recorded step, the one that ``trace.json`` shows: that of the try whose plan Stable runs; before
                   there is one, the last recorded. null before any step
=================  ================================================================================================

Fields of ``step``; {measured, predicted, without_plan}: as it ran, as written down before it ran, and what the same
step would take if nothing were swapped (simulated).

==================  ================================================================================================
step_ms, stall_ms   time of the step; time in it that compute waited for copies
recompute_ms        time in it in which modules ran again
phases              by phase (forward, backward, optimizer): most bytes allocated, and most reserved by the
                    allocator, which is not predicted
static_bytes        allocated when the step began
held_bytes          most held by activations at the end of a microbatch's forward
bytes_out, _in      copied to the host and back, called-off copies included
copy_ms             time in which copies ran, out and in
hidden_share        share of the copies' time in which compute did not wait for any; null without copies
counters            of the step: see ``core/step.py``
layers, tensors     bytes saved in the step by layer (0: outside the layers), and by site for the largest: swapped,
                    kept, immovable (kept because they cannot be moved)
notes               sentences: what a reader must not miss
==================  ================================================================================================
"""
from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.fine_grained.front_end import Listed
from mindspeed_swap.report.figures import figures
from mindspeed_swap.smart_swap.search import SmartSwap
from mindspeed_swap.version import __version__, installed


def summarize(
    search: SmartSwap | None,
    pool: HostPool,
    device: str,
    layout: Mapping[str, Any],
    virtual_optimizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All but which rank of which run it is. ``search``, ``virtual_optimizer``: None where the feature is off."""
    return {
        "versions": versions(),
        "device": device,
        "layout": dict(layout),
        **(_smart_swap(search) if search else {**_smart_swap(SmartSwap(0)), "feature": None, "phase": "off"}),
        "swap_config": search.summary() if isinstance(search, Listed) else None,
        "virtual_optimizer": dict(virtual_optimizer) if virtual_optimizer else None,
        "host": {
            "budget_bytes": pool.budget_bytes,
            "pinned_bytes": pool.pinned_bytes,
            "peak_used_bytes": pool.peak_used_bytes,
        },
    }


def _smart_swap(search: SmartSwap) -> dict[str, Any]:
    plan = search.plan
    return {
        "feature": search.policy.feature,
        "phase": search.phase.value,
        "steps": search.steps,
        "capacity_bytes": search.capacity_bytes,
        "target_bytes": search.target_bytes,
        "peak_bytes": search.peak_bytes,
        "floor_bytes": search.floor.bytes if search.floor else None,
        "floor": asdict(search.floor) if search.floor else None,
        "warm_up": asdict(search.warm_up) if search.warm_up else None,
        "plan": {
            "swap_bytes": plan.swap_bytes if plan else 0,
            "tensors": len(plan.swaps) if plan else 0,
            "prediction": asdict(plan.prediction) if plan and plan.prediction else None,
        },
        "tries": [
            {
                "swap_bytes": t.plan.swap_bytes,
                "trouble": t.trouble,
                "peak_bytes": t.peak_bytes,
                "step_ms": t.step_ms,
                "over_bytes": t.over_bytes,
                "predicted_peak_bytes": t.plan.prediction.peak if t.plan.prediction else None,
                "predicted_step_ms": t.plan.prediction.step_ms if t.plan.prediction else None,
            }
            for t in search.tries
        ],
        "stable": asdict(search.stable),
        "step": figures(search.shown) if search.shown else None,
    }


def versions() -> dict[str, str]:
    """Of what decides how a step runs."""
    return {
        "mindspeed_swap": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "megatron-core": installed("megatron-core") or "not installed",
    }
