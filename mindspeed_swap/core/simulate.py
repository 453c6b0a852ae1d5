"""Simulate: what a step costs in memory and time under a plan. Pure; imports no torch.

The rules are those of the swap manager:

1. Where a planned tensor is first saved, its copy to the host is queued on the D2H lane (lanes.py); it starts when
   compute has reached that point and the lane is free.
2. At ``release`` compute waits for that copy, then the device memory goes: resident through the interval that the point
   closes, not after.
3. At ``prefetch`` the buffer is allocated (resident from the next interval on) and the copy back is queued on the H2D
   lane. Several at one point are queued in the order of ``plan.swaps``.
4. At ``first_read`` compute waits for the copy back. One that was not queued by then is loaded on demand.
5. What a recomputed module frees is not resident once nobody else holds it, and again from the interval after the
   point at which it runs again (recompute.py); its inputs are read there.

Within one point: releases, then prefetches, then reads, then a recompute, then the save. The times of the trace are
those of a step without waits; a wait or a recompute moves everything after it. Figures are bytes and milliseconds.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mindspeed_swap.core.checked import first_difference
from mindspeed_swap.core.lanes import Copy, Placed, Stall, load_index, run_lanes
from mindspeed_swap.core.plan import Plan, Prediction, Recompute, Swap
from mindspeed_swap.core.recompute import Chosen, Module, as_they_run, first_reads, modules_of
from mindspeed_swap.core.trace import Key, Position, SavedRecord, StepTrace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulated step did."""

    peak_bytes: dict[str, int]  # by phase
    curve: list[int]  # peak bytes of every interval
    d2h: list[Copy]
    h2d: list[Copy]
    stalls: list[Stall]
    late_loads: list[Key]  # reads that had to wait
    step_ms: float
    stall_ms: float
    recompute_ms: float
    host_bytes: int  # most at once
    host_ms: float

    @property
    def peak(self) -> int:
        return max(self.peak_bytes.values(), default=0)

    @property
    def prediction(self) -> Prediction:
        return Prediction(
            self.peak_bytes, self.step_ms, self.stall_ms, self.recompute_ms, self.host_bytes, self.host_ms
        )


def simulate(trace: StepTrace, plan: Plan) -> Outcome:
    """Raises ValueError when the plan is not one for this trace: other model, unknown tensor, size or position."""
    modules = recomputed(trace, plan)
    placed = place(trace, plan)
    freed = {number for module in modules for number in module.frees}
    for number, _, _ in placed:
        if number in freed:
            raise ValueError(f"plan swaps and recomputes {tuple(trace.saved[number].key)}")
    return outcome(trace, placed, modules)


def predicted(trace: StepTrace, plan: Plan) -> Plan:
    """The plan with what it is simulated to do."""
    return replace(plan, prediction=simulate(trace, plan).prediction)


def outcome(trace: StepTrace, placed: Sequence[Placed], modules: Sequence[Module]) -> Outcome:
    """The same of a plan in indices, which is taken to be one for this trace."""
    curve = memory_curve(trace, placed, modules)
    timeline = run_lanes(trace, placed, modules)
    return Outcome(
        peak_bytes=phase_peaks(trace, curve),
        curve=curve,
        d2h=timeline.d2h,
        h2d=timeline.h2d,
        stalls=timeline.stalls,
        late_loads=[stall.key for stall in timeline.stalls if stall.cause == "read"],
        step_ms=plain_step_ms(trace) + timeline.extra_ms,
        stall_ms=timeline.stall_ms,
        recompute_ms=timeline.recompute_ms,
        host_bytes=host_peak(trace, placed, modules),
        host_ms=timeline.host_ms,
    )


def plain_step_ms(trace: StepTrace) -> float:
    """The step without swap; a trace that does not say so ends with its last point."""
    return max(trace.step_ms - trace.stall_ms - trace.moving_ms, trace.points[-1].time_ms if trace.points else 0.0)


def position_index(trace: StepTrace) -> dict[Position, int]:
    """Position -> point index. A position met twice means its first point: that is where the manager acts."""
    index: dict[Position, int] = {}
    for i, point in enumerate(trace.points):
        index.setdefault(point.position, i)
    return index


def place(trace: StepTrace, plan: Plan) -> list[Placed]:
    """The plan in indices, in its own order. Raises ValueError naming the first thing that is not of this trace."""
    if other := first_difference(plan.model, trace.model, "the trace"):
        raise ValueError(f"plan is for another model: {other}")
    records = {record.key: i for i, record in enumerate(trace.saved)}
    index = position_index(trace) if plan.swaps else {}
    placed: list[Placed] = []
    seen: set[Key] = set()
    for swap in plan.swaps:
        number = records.get(swap.key)
        if number is None:
            raise ValueError(f"plan swaps {tuple(swap.key)}, which the trace never saved")
        if swap.key in seen:
            raise ValueError(f"plan swaps {tuple(swap.key)} twice")
        seen.add(swap.key)
        if swap.nbytes != trace.saved[number].nbytes:
            raise ValueError(
                f"plan swaps {swap.nbytes} bytes of {tuple(swap.key)}, the trace saved {trace.saved[number].nbytes}"
            )
        for name, position in (("release", swap.release), ("prefetch", swap.prefetch)):
            if position not in index:
                raise ValueError(f"{name} of {tuple(swap.key)} is at {tuple(position)}, which the trace never met")
        if index[swap.release] <= trace.saved[number].saved:
            raise ValueError(f"{tuple(swap.key)} is released before it is saved, at {tuple(swap.release)}")
        placed.append(Placed(number, index[swap.release], index[swap.prefetch]))
    return placed


def plan_of(trace: StepTrace, budget: int, placed: Iterable[Placed], modules: Iterable[Module] = ()) -> Plan:
    """The other way round: names for indices."""
    saved, points = trace.saved, trace.points
    swaps = (
        Swap(saved[i].key, saved[i].nbytes, points[release].position, points[prefetch].position)
        for i, release, prefetch in placed
    )
    recomputes = (Recompute(m.record.key, m.freed_bytes, m.record.forward_ms) for m in modules)
    return Plan(trace.model, budget, tuple(swaps), tuple(recomputes))


def recomputed(trace: StepTrace, plan: Plan) -> list[Module]:
    """The modules that the plan recomputes. Raises ValueError naming the first that is not of this trace."""
    if not plan.recomputes:
        return []
    modules = modules_of(trace)
    index = {module.record.key: m for m, module in enumerate(modules)}
    chosen = Chosen(modules)
    for recompute in plan.recomputes:
        name = tuple(recompute.key)
        m = index.get(recompute.key)
        if m is None:
            raise ValueError(f"plan recomputes {name}, which the trace never saw, or which frees nothing")
        if recompute.nbytes != modules[m].freed_bytes:
            raise ValueError(f"plan frees {recompute.nbytes} bytes of {name}, the trace {modules[m].freed_bytes}")
        if chosen.flags[m] or chosen.conflicts(m):
            raise ValueError(f"plan recomputes {name} twice, or something that overlaps with it")
        chosen.add(m)
    return as_they_run(trace, chosen.members())


def memory_curve(trace: StepTrace, placed: Iterable[Placed], modules: Iterable[Module] = ()) -> list[int]:
    """Peak bytes of every interval: base plus the saved tensors that the plan keeps resident through it."""
    length = len(trace.points)
    delta = [0] * (length + 1)
    modules = list(modules)
    needed = first_reads(trace, modules)
    for record in trace.saved:
        last = _last_interval(record, length)
        if last > record.saved:
            delta[record.saved + 1] += record.nbytes
            delta[last + 1] -= record.nbytes
    for number, release, prefetch in placed:
        record = trace.saved[number]
        first, last = away(record, needed.get(number, record.first_read), release, prefetch, length)
        if first <= last:
            delta[first] -= record.nbytes
            delta[last + 1] += record.nbytes
    for i, change in recompute_changes(trace, modules):
        delta[i] += change
    return [trace.base_bytes(i) + held for i, held in zip(range(length), accumulate(delta), strict=False)]


def recompute_changes(trace: StepTrace, modules: Iterable[Module]) -> Iterator[tuple[int, int]]:
    """(interval, change of bytes from it on)."""
    end, kept_until = len(trace.points), dict[int, int]()
    for module in modules:
        for number, first, last in module.away:
            nbytes = trace.saved[number].nbytes
            yield first, -nbytes
            yield last + 1, nbytes
        for number in module.frees:  # what others still hold is there twice once it has been made again
            record = trace.saved[number]
            until = min(end if each is None else each for each in (record.died, record.sole))
            if module.run < until:
                yield module.run + 1, record.nbytes
                yield min(until + 1, end), -record.nbytes
        for number in module.keeps:
            kept_until[number] = max(kept_until.get(number, 0), module.run + 2)
        yield module.record.end + 1, module.record.input_bytes
        yield module.run + 1, module.working_bytes
        yield min(module.run + 2, end), -module.working_bytes - module.record.input_bytes
    for number, until in kept_until.items():  # what else reads it in backward may be done with it before
        record = trace.saved[number]
        if record.died is not None and record.died < until - 1:
            yield record.died, record.nbytes
            yield min(until, end), -record.nbytes


def away(record: SavedRecord, read: int | None, release: int, prefetch: int, length: int) -> tuple[int, int]:
    """First and last interval in which a swapped tensor is off the device; empty when first > last. Who else holds the
    storage decides: before ``sole`` a release frees nothing."""
    last = _last_interval(record, length)
    if record.sole is None:
        return last + 1, last
    return max(release, record.sole, record.saved) + 1, min(load_index(record, read, release, prefetch), last)


def _last_interval(record: SavedRecord, length: int) -> int:
    return length - 1 if record.died is None else record.died - 1


def host_peak(trace: StepTrace, placed: Iterable[Placed], modules: Iterable[Module] = ()) -> int:
    """Most bytes on the host at once: a copy has its place there from the save until it is read back."""
    needed = first_reads(trace, modules)
    delta = [0] * (len(trace.points) + 1)
    for number, _, _ in placed:
        record = trace.saved[number]
        read = needed.get(number, record.first_read)
        delta[record.saved] += record.nbytes
        if read is not None:
            delta[read + 1] -= record.nbytes
    return max(accumulate(delta))


def phase_peaks(trace: StepTrace, curve: Sequence[int]) -> dict[str, int]:
    """Largest value of the curve in each phase, phases in the order in which they begin."""
    peaks: dict[str, int] = {}
    for point, value in zip(trace.points, curve, strict=True):
        phase = point.position.phase
        if value > peaks.get(phase, -1):
            peaks[phase] = value
    return peaks
