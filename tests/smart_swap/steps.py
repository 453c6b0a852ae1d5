"""Steps as they would be recorded under a plan: the simulation of the core, played back as a measurement. Pure."""
from __future__ import annotations

from dataclasses import replace

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import memory_curve, simulate
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.search import SmartSwap


def executed(trace: StepTrace, plan: Plan | None) -> StepTrace:
    """``trace`` is of a step that swaps nothing."""
    if plan is None or not plan.swaps:
        return trace
    outcome = simulate(trace, plan)
    keep = memory_curve(trace, ())
    points = [
        replace(point, peak_bytes=peak, resident_bytes=point.resident_bytes - (plain - peak))
        for point, peak, plain in zip(trace.points, outcome.curve, keep, strict=True)
    ]
    return replace(trace, points=points, step_ms=outcome.step_ms, stall_ms=outcome.stall_ms)


def peak(trace: StepTrace) -> int:
    return max(point.peak_bytes for point in trace.points)


def run(search: SmartSwap, trace: StepTrace, stats: StepStats | None = None) -> Plan | None:
    """One step of this work. Returns the plan it ran under."""
    order = search.next_step()
    step = executed(trace, order.plan)
    took_ms = step.step_ms if search.times else None
    search.after_step(stats or StepStats(saves=len(trace.saved)), step if order.record else None, took_ms)
    return order.plan


def settle(search: SmartSwap, trace: StepTrace, most: int = 20) -> int:
    """Steps until Stable. The first one has no optimizer state."""
    for step in range(1, most + 1):
        run(search, trace if step > 1 or search.steps else replace(trace, has_optimizer_state=False))
        if search.phase is Phase.STABLE:
            return step
    raise AssertionError(f"not stable after {most} steps")
