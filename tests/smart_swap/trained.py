"""What runs of real Megatron are given, and what of their steps is looked at."""
from __future__ import annotations

from typing import Any

from layout_runs import Run

from mindspeed_swap.units import GIB


def gib(nbytes: float) -> str:
    """As --swap-memory-target takes it."""
    return f"{nbytes / GIB:.9f}"


def stable_steps(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    """Of what was measured, the steps that Stable ran."""
    steps = run.measured[rank]["steps"]
    return steps[len(steps) - run.summaries[rank]["stable"]["steps"] :]


def stable_peak(run: Run, rank: int = 0) -> int:
    return max(step["peak_bytes"] for step in stable_steps(run, rank))
