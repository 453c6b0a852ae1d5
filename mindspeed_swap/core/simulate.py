"""Simulate: what a step costs in memory and time under a plan. Pure; imports no torch.

The rules are those of the swap manager:

1. Where a planned tensor is first saved, its copy to the host is queued on the D2H lane. A lane is first in, first out;
   a copy starts when compute has reached the point that queued it and the lane is free.
2. At ``release`` compute waits for that copy, then the device memory goes: resident through the interval that the point
   closes, not after.
3. At ``prefetch`` the buffer is allocated (resident from the next interval on) and the copy back is queued on the H2D
   lane. Several at one point are queued in the order of ``plan.swaps``.
4. At ``first_read`` compute waits for the copy back. One that was not queued by then is loaded on demand.

Within one point: releases, then prefetches, then the save or read itself. The times of the trace are those of a step
without waits; a wait moves everything after it. Figures are bytes and milliseconds.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.trace import Key, Position, SavedRecord, StepTrace

# Waits below this are rounding of floating-point sums, not waits.
NEGLIGIBLE_MS = 1e-6


class Copy(NamedTuple):
    """One copy on a lane."""

    key: Key
    start_ms: float
    end_ms: float


class Stall(NamedTuple):
    """Compute waited ``wait_ms`` at point number ``point`` for the copy of ``key``; ``cause``: "release" or "read"."""

    key: Key
    point: int
    wait_ms: float
    cause: str


class Placed(NamedTuple):
    """A swap in indices: ``record`` into ``trace.saved``, ``release`` and ``prefetch`` into ``trace.points``."""

    record: int
    release: int
    prefetch: int


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

    @property
    def peak(self) -> int:
        return max(self.peak_bytes.values(), default=0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The lanes and the waits, without the memory."""

    d2h: list[Copy]
    h2d: list[Copy]
    stalls: list[Stall]
    stall_ms: float


def simulate(trace: StepTrace, plan: Plan) -> Outcome:
    """Raises ValueError when the plan is not one for this trace: other model, unknown tensor, size or position."""
    placed = place(trace, plan)
    curve = memory_curve(trace, placed)
    timeline = run_lanes(trace, placed)
    return Outcome(
        peak_bytes=phase_peaks(trace, curve),
        curve=curve,
        d2h=timeline.d2h,
        h2d=timeline.h2d,
        stalls=timeline.stalls,
        late_loads=[stall.key for stall in timeline.stalls if stall.cause == "read"],
        step_ms=plain_step_ms(trace) + timeline.stall_ms,
        stall_ms=timeline.stall_ms,
    )


def plain_step_ms(trace: StepTrace) -> float:
    """The step without swap; a trace that does not say so ends with its last point."""
    return max(trace.step_ms - trace.stall_ms, trace.points[-1].time_ms if trace.points else 0.0)


def position_index(trace: StepTrace) -> dict[Position, int]:
    """Position -> point index. A position met twice means its first point: that is where the manager acts."""
    index: dict[Position, int] = {}
    for i, point in enumerate(trace.points):
        index.setdefault(point.position, i)
    return index


def place(trace: StepTrace, plan: Plan) -> list[Placed]:
    """The plan in indices, in its own order. Raises ValueError naming the first thing that is not of this trace."""
    if plan.model != trace.model:
        raise ValueError(f"plan is for model {plan.model!r}, trace is of {trace.model!r}")
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


def memory_curve(trace: StepTrace, placed: Iterable[Placed]) -> list[int]:
    """Peak bytes of every interval: base plus the saved tensors that the plan keeps resident through it."""
    length = len(trace.points)
    delta = [0] * (length + 1)
    for record in trace.saved:
        last = _last_interval(record, length)
        if last > record.saved:
            delta[record.saved + 1] += record.nbytes
            delta[last + 1] -= record.nbytes
    for number, release, prefetch in placed:
        record = trace.saved[number]
        first, last = away(record, release, prefetch, length)
        if first <= last:
            delta[first] -= record.nbytes
            delta[last + 1] += record.nbytes
    resident = accumulate(delta)
    return [max(0, p.peak_bytes - p.resident_bytes) + held for p, held in zip(trace.points, resident, strict=False)]


def away(record: SavedRecord, release: int, prefetch: int, length: int) -> tuple[int, int]:
    """First and last interval in which a swapped tensor is off the device; empty when first > last. Who else holds the
    storage decides: before ``sole`` a release frees nothing."""
    last = _last_interval(record, length)
    if record.sole is None:
        return last + 1, last
    return max(release, record.sole, record.saved) + 1, min(_load_index(record, release, prefetch), last)


def _last_interval(record: SavedRecord, length: int) -> int:
    return length - 1 if record.died is None else record.died - 1


def _load_index(record: SavedRecord, release: int, prefetch: int) -> int:
    """Where the copy back is queued: on demand at the read, if the prefetch comes too late or before the release."""
    if record.first_read is None:
        return prefetch
    return record.first_read if prefetch <= release else min(prefetch, record.first_read)


def phase_peaks(trace: StepTrace, curve: Sequence[int]) -> dict[str, int]:
    """Largest value of the curve in each phase, phases in the order in which they begin."""
    peaks: dict[str, int] = {}
    for point, value in zip(trace.points, curve, strict=True):
        phase = point.position.phase
        if value > peaks.get(phase, -1):
            peaks[phase] = value
    return peaks


def run_lanes(trace: StepTrace, placed: Sequence[Placed]) -> Timeline:
    """Both lanes and every wait, in the order of the step."""
    releases: dict[int, list[int]] = {}
    prefetches: dict[int, list[int]] = {}
    saves: dict[int, list[int]] = {}
    reads: dict[int, list[int]] = {}
    for slot, (number, release, prefetch) in enumerate(placed):
        record = trace.saved[number]
        saves.setdefault(record.saved, []).append(slot)
        releases.setdefault(release, []).append(slot)
        prefetches.setdefault(_load_index(record, release, prefetch), []).append(slot)
        if record.first_read is not None:
            reads.setdefault(record.first_read, []).append(slot)
    keys = [trace.saved[number].key for number, _, _ in placed]
    sizes = [trace.saved[number].nbytes for number, _, _ in placed]
    out_end = [0.0] * len(placed)
    in_end = [0.0] * len(placed)
    out_free = in_free = shift = 0.0
    d2h: list[Copy] = []
    h2d: list[Copy] = []
    stalls: list[Stall] = []
    for i in sorted({*saves, *releases, *prefetches, *reads}):
        now = trace.points[i].time_ms + shift
        for slot in releases.get(i, ()):
            wait = out_end[slot] - now
            if wait > NEGLIGIBLE_MS:
                stalls.append(Stall(keys[slot], i, wait, "release"))
                shift += wait
                now += wait
        for slot in prefetches.get(i, ()):
            start = max(now, in_free)
            in_free = in_end[slot] = start + sizes[slot] / trace.h2d_bytes_per_ms
            h2d.append(Copy(keys[slot], start, in_free))
        for slot in reads.get(i, ()):
            wait = in_end[slot] - now
            if wait > NEGLIGIBLE_MS:
                stalls.append(Stall(keys[slot], i, wait, "read"))
                shift += wait
                now += wait
        for slot in saves.get(i, ()):
            start = max(now, out_free)
            out_free = out_end[slot] = start + sizes[slot] / trace.d2h_bytes_per_ms
            d2h.append(Copy(keys[slot], start, out_free))
    return Timeline(d2h, h2d, stalls, shift)
