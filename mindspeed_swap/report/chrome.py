"""``rank<N>/trace.json``: one recorded step for chrome://tracing and https://ui.perfetto.dev. Pure; imports no torch.

Lanes (threads) of the one process, which is the rank: microbatches; layers; stalls (compute waits for a copy); copies
to the host; copies to the device; custom operators that gave their names. Counters, at every point of the step:
allocated bytes, the peak since the point before, the peak had nothing been swapped (simulated), reserved bytes. Times
are device time from the start of the step.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_swap.core.simulate import memory_curve
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.core.trace import EXIT, FORWARD, OPTIMIZER, OUTSIDE, RECOMPUTED, Position, StepTrace
from mindspeed_swap.report.figures import PHASES

MICROBATCHES, LAYERS, STALLS, TO_HOST, TO_DEVICE, OPERATORS = range(1, 7)
LANES = {
    MICROBATCHES: "compute: microbatches",
    LAYERS: "compute: layers",
    STALLS: "stalls",
    TO_HOST: "copies to host (D2H)",
    TO_DEVICE: "copies to device (H2D)",
}
CUSTOM = {OPERATORS: "custom operators"}  # a lane where there are any
ALLOCATED, PEAK, PLAIN, RESERVED = "allocated", "peak", "peak without plan", "reserved"
# A wait that need not wait still takes the time between two events; below this it is not shown as a stall.
SHORTEST_STALL_MS = 0.01
_CAUSES = {
    "RELEASE_AFTER_OFFLOAD": "copy to host not done", "USE_AFTER_LOAD": "copy to device not done",
    RECOMPUTED: "recompute",
}  # fmt: skip

Event = dict[str, Any]


def chrome_trace(step: ExecutedStep, rank: int, run_id: str) -> dict[str, Any]:
    """The file's content. ``otherData`` says of which run and rank it is."""
    events: list[Event] = [_named("process_name", rank, 0, f"rank {rank}")]
    for lane, name in (LANES | (CUSTOM if step.trace.operators else {})).items():
        events += [_named("thread_name", rank, lane, name), _sorted(rank, lane)]
    spans = [*_compute(step.trace), *_copies(step), *_stalls(step.trace), *_operators(step.trace)]
    events += [{"ph": "X", "pid": rank, **span} for span in spans]
    events += [{"ph": "C", "pid": rank, **sample} for sample in _memory(step.trace)]
    other = {"run_id": run_id, "rank": rank, "step_ms": step.trace.step_ms, "by": "mindspeed_swap"}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _named(what: str, rank: int, lane: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _sorted(rank: int, lane: int) -> Event:
    return {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def _span(lane: int, name: str, category: str, start_ms: float, end_ms: float, **args: Any) -> Event:
    span = {"tid": lane, "name": name, "cat": category, "ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}
    return {**span, "args": args}


# ---- compute
def _compute(trace: StepTrace) -> Iterator[Event]:
    """What ran, told from the points between which it ran: the longest runs of one microbatch, then of one layer."""
    times = [0.0, *trace.measured_ms(), trace.step_ms]
    positions = [point.position for point in trace.points]
    # Between point i - 1 and point i: times[i] to times[i + 1].
    running = [_runs_after(before, after) for before, after in zip([None, *positions], [*positions, None], strict=True)]
    for lane, fields in ((MICROBATCHES, 3), (LAYERS, 4)):  # of a Position
        keys = [position and position[:fields] for position in running]
        start = 0
        for i in range(1, len(running) + 1):
            if i < len(running) and keys[i] == keys[start]:
                continue
            position = running[start]
            if position is not None and times[i] > times[start]:
                yield _compute_span(lane, position, times[start], times[i])
            start = i


def _runs_after(before: Position | None, after: Position | None) -> Position | None:
    """Whose work lies between two neighbouring points. None: nobody's, such as the end of the step."""
    if before is None:
        return after
    if before.phase == OPTIMIZER:
        return None if before.ordinal == EXIT else before
    if before.phase == FORWARD and before.ordinal == EXIT:
        return before._replace(layer=OUTSIDE) if before.layer != OUTSIDE else after
    return before


def _compute_span(lane: int, position: Position, start_ms: float, end_ms: float) -> Event:
    phase = PHASES[position.phase]
    chunk = f" chunk {position.chunk}" if position.chunk else ""
    if position.phase == OPTIMIZER:
        name = phase
    elif lane == MICROBATCHES:
        name = f"{phase} {position.microbatch}{chunk}"
    else:
        layer = f"layer {position.layer}" if position.layer else "outside layers"
        name = f"{layer}{chunk} {phase} {position.microbatch}"
    args = {"microbatch": position.microbatch, "chunk": position.chunk}
    if lane == LAYERS:
        args["layer"] = position.layer
    return _span(lane, name, phase, start_ms, end_ms, **args)


# ---- copies and stalls
def _copies(step: ExecutedStep) -> Iterator[Event]:
    planned = {swap.key for swap in step.plan.swaps}
    free = {True: 0.0, False: 0.0}
    for copy in step.trace.copies:
        # A lane carries one copy at a time; events on it may be a rounding error early.
        start = max(copy.start_ms, free[copy.to_host])
        free[copy.to_host] = end = max(copy.end_ms, start)
        lane, category = (TO_HOST, "D2H") if copy.to_host else (TO_DEVICE, "H2D")
        yield _span(
            lane, f"{category} {copy.key}", category, start, end,
            bytes=copy.nbytes, planned=copy.key in planned, **copy.key._asdict(),
        )  # fmt: skip


def _stalls(trace: StepTrace) -> Iterator[Event]:
    for wait in trace.waits:
        if wait.end_ms - wait.start_ms >= SHORTEST_STALL_MS:
            cause = _CAUSES.get(wait.cause, "memory needed at once")
            yield _span(STALLS, cause, "stall", wait.start_ms, wait.end_ms, of=str(wait.key), **wait.key._asdict())


def _operators(trace: StepTrace) -> Iterator[Event]:
    for operator in trace.operators:
        yield _span(OPERATORS, operator.name, "operator", operator.start_ms, operator.end_ms)


# ---- memory
def _memory(trace: StepTrace) -> Iterator[Event]:
    plain = memory_curve(trace, ())
    for point, at_ms, without in zip(trace.points, trace.measured_ms(), plain, strict=True):
        figures = {
            ALLOCATED: point.allocated_bytes,
            PEAK: point.peak_bytes,
            PLAIN: without,
            RESERVED: point.reserved_bytes,
        }
        for name, value in figures.items():
            yield {"name": name, "ts": at_ms * 1e3, "args": {"bytes": value}}

