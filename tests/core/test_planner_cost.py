"""The planner's work for large steps, counted in function calls. Seconds depend on the machine: see scripts/bench.

96 layers x 8 microbatches take about a second on one core, and up to 3 million calls.
"""
from __future__ import annotations

import sys
from math import log
from typing import Any

import pytest
from traces import LLAMA_MODULES, Shape, megatron_trace

from mindspeed_swap.core.simulate import memory_curve, simulate
from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP, floor, solve

MOST_CALLS = 8_000_000


def calls_of(layers: int, share: float, verbs: tuple[str, ...]) -> tuple[int, int]:
    """(points of the step, calls of functions to solve it)."""
    trace = megatron_trace(Shape(layers=layers, microbatches=8, stages=8, both_gbps=43.0, modules=LLAMA_MODULES))
    low, high = floor(trace, verbs).reachable_bytes, max(memory_curve(trace, ()))
    budget = low + int((high - low) * share)
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        plan = solve(trace, budget, verbs)
    finally:
        sys.setprofile(before)
    assert simulate(trace, plan).peak <= budget
    return len(trace.points), count


@pytest.mark.parametrize("verbs", [KEEP_SWAP, ALL_VERBS])
@pytest.mark.parametrize("share", [0.8, 0.3])
def test_work_of_large_steps_is_bounded_and_grows_no_faster_than_n_log_n(share: float, verbs: tuple[str, ...]) -> None:
    (small, few), (large, many) = (calls_of(layers, share, verbs) for layers in (24, 96))
    growth = (many / (large * log(large))) / (few / (small * log(small)))
    print(f"\n{small} points: {few} calls; {large}: {many}; per n log n x {growth:.2f}")
    assert many <= MOST_CALLS
    assert growth <= 2.0  # one more target or set of modules may be looked at
