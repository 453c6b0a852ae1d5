"""``rank<N>/summary.json``: one rank's figures. All sizes in bytes, times in milliseconds."""
from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mindspeed_swap import __version__
from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.log import say
from mindspeed_swap.smart_swap.search import SmartSwap

SUMMARY_VERSION = 1


def summarize(
    search: SmartSwap | None, pool: HostPool, accelerator: Accelerator, virtual_optimizer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Of the features that are on: ``search`` and ``virtual_optimizer`` are None where theirs is not."""
    return {
        "version": SUMMARY_VERSION,
        "versions": {"mindspeed_swap": __version__, "torch": torch.__version__},
        "device": accelerator.name,
        **(_smart_swap(search) if search else {}),
        "virtual_optimizer": virtual_optimizer,
        "host": {
            "budget_bytes": pool.budget_bytes,
            "pinned_bytes": pool.pinned_bytes,
            "peak_used_bytes": pool.peak_used_bytes,
        },
    }


def _smart_swap(search: SmartSwap) -> dict[str, Any]:
    plan = search.plan
    return {
        "phase": search.phase.value,
        "steps": search.steps,
        "capacity_bytes": search.capacity_bytes,
        "target_bytes": search.target_bytes,
        "peak_bytes": search.peak_bytes,
        "floor_bytes": search.floor.bytes if search.floor else None,
        "floor": asdict(search.floor) if search.floor else None,
        "plan": {
            "swap_bytes": plan.swap_bytes if plan else 0,
            "tensors": len(plan.swaps) if plan else 0,
            "prediction": asdict(plan.prediction) if plan and plan.prediction else None,
        },
        "tries": [
            {"swap_bytes": t.plan.swap_bytes, "trouble": t.trouble, "peak_bytes": t.peak_bytes, "step_ms": t.step_ms}
            for t in search.tries
        ],
        "stable": asdict(search.stable),
    }


def write_summary(
    directory: str,
    rank: int,
    search: SmartSwap | None,
    pool: HostPool,
    accelerator: Accelerator,
    virtual_optimizer: dict[str, Any] | None = None,
) -> None:
    """Replaces the rank's file as a whole. A full disk is said and never stops training."""
    path = Path(directory) / f"rank{rank}" / "summary.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(summarize(search, pool, accelerator, virtual_optimizer), indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        say(f"report not written: {error}", every_rank=True)
