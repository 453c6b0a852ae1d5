"""A recorded step told as it is without recording, by how long the same step took when it was not recorded. No torch.

host_lag.py takes out what recording, and moves, are known to have taken the host. What it does not know of (caches,
calls that are longer for it) is left where the device waits for the host, about as much at every point.
"""
from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

from mindspeed_swap.core.simulate import plain_step_ms
from mindspeed_swap.core.trace import CopyRecord, ModuleRecord, OperatorRecord, StepTrace, WaitRecord
from mindspeed_swap.core.windows import WAITS_SHARE

# How much faster than the recorded one the step is that a plan is made for, where the device waits for the host.
HURRY_SHARE = 0.1
_Record = TypeVar("_Record", CopyRecord, WaitRecord, OperatorRecord)
# Of an interval, at most: the step's own work takes the host some of it.
MOST_SHARE = 0.8


def retimed(trace: StepTrace, step_ms: float, host_ms: float = 0.0) -> StepTrace:
    """With intervals in which the device waits for the host shortened until the step takes ``step_ms``, as far as that
    goes; all by the same time, short ones by less. Where the host is ahead, and of a shorter step, nothing changes.

    ``host_ms``: what the moves of its plan take the host. What of that was not seen where they are is no time of a step
    without the plan: so the plan is told to take as long as it did, and one that moves less to take less."""
    points = trace.points
    step_ms -= max(0.0, host_ms - trace.moving_ms)
    most = [0.0] * len(points)  # that may be cut before each point
    for i, (point, after) in enumerate(pairwise(points), 1):
        if point.waits_for_host:
            most[i] = MOST_SHARE * max(0.0, after.time_ms - point.time_ms)
    cut = _level(most, trace.step_ms - step_ms)
    if cut <= 0.0:
        return trace
    passed = trace.measured_ms()
    earlier = list(accumulate(min(each, cut) for each in most))

    def moved(records: list[_Record]) -> list[_Record]:
        found = []
        for record in records:
            index = bisect_right(passed, record.start_ms)
            ms = earlier[index - 1] if index else 0.0
            found.append(replace(record, start_ms=record.start_ms - ms, end_ms=record.end_ms - ms))
        return found

    def shorter(module: ModuleRecord) -> ModuleRecord:
        """What it takes to run again, less by the same share as its forward."""
        took = points[module.end].time_ms - points[module.begin].time_ms
        if took <= 0.0:
            return module
        left = 1.0 - (earlier[module.end] - earlier[module.begin]) / took
        return replace(module, forward_ms=module.forward_ms * left)

    return replace(
        trace,
        points=[replace(point, time_ms=point.time_ms - ms) for point, ms in zip(points, earlier, strict=True)],
        modules=[shorter(module) for module in trace.modules],
        copies=moved(trace.copies), waits=moved(trace.waits), operators=moved(trace.operators),
        step_ms=trace.step_ms - earlier[-1],
    )  # fmt: skip


def hurried(trace: StepTrace) -> StepTrace:
    """What a plan is best made from. Where the device waits for the host, steps differ by a third; a plan that counts
    on the time that copies have in a slow one waits for them in all others, and one that recomputes a little more
    instead loses next to nothing in the slow ones. (Simulated from five recorded steps of experts on an H200, at ten
    budgets: made for a step of 150 ms a plan takes 6 ms longer in one of 130 than one made for that, at most 10; the
    other way round it is 0.7, at most 3.)"""
    if trace.forward_waits <= WAITS_SHARE:
        return trace
    quick = retimed(trace, trace.step_ms - HURRY_SHARE * plain_step_ms(trace))
    if quick is trace:
        return trace
    modules = [
        module if module.again_ms is None or before.forward_ms <= 0
        else replace(module, again_ms=module.again_ms * module.forward_ms / before.forward_ms)  # it was as slow then
        for module, before in zip(quick.modules, trace.modules, strict=True)
    ]  # fmt: skip
    return replace(quick, modules=modules)


def _level(most: list[float], wanted: float) -> float:
    """So that ``min(each, level)`` add up to ``wanted``, or as much as there is."""
    rising = sorted(each for each in most if each > 0.0)
    for number, each in enumerate(rising):
        left = len(rising) - number
        if wanted <= each * left:
            return wanted / left
        wanted -= each
    return rising[-1] if rising else 0.0
