"""Lanes: when the copies of both directions run, and where compute waits for them. Pure; imports no torch.

A lane is first in, first out. While both are busy each runs at its slower rate: they share one link.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_swap.core.recompute import Module, first_reads
from mindspeed_swap.core.trace import Key, SavedRecord, StepTrace

# Waits below this are rounding of floating-point sums, not waits.
NEGLIGIBLE_MS = 1e-6
_NEVER = float("inf")
# What a tensor that is moved takes the host beyond one that is kept, as it leaves and as it comes back. It shows as far
# as the device waits for the host in that phase: not there and then, but at the next point where it does. That is three
# times what it takes in a loop of nothing else (H200, between the small kernels of experts, in a step of 140 ms: 18 to
# 22 tensors do not show, 29 take 4 ms).
MOVE_HOST_MS = 0.25
# What happens at one point, in this order.
_RELEASE, _PREFETCH, _READ, _RUN, _SAVE = range(5)


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
class Timeline:
    """The lanes and the waits, without the memory."""

    d2h: list[Copy]
    h2d: list[Copy]
    stalls: list[Stall]
    stall_ms: float
    recompute_ms: float
    host_ms: float

    @property
    def extra_ms(self) -> float:
        """What the step takes above a plain one."""
        return self.stall_ms + self.recompute_ms + self.host_ms


class _Lane:
    def __init__(self, alone: float, both: float, overhead: float, nbytes: list[int]) -> None:
        self.ms = [overhead + size / alone for size in nbytes]
        self.slower = alone / both if both > 0 else 1.0
        self.queue: deque[int] = deque()  # the first one is under way
        self.due = _NEVER  # its end, as things are
        self.start = [0.0] * len(nbytes)
        self.end = [_NEVER] * len(nbytes)
        self.done: list[int] = []


class _Link:
    """Both lanes, played forward in time."""

    def __init__(self, trace: StepTrace, nbytes: list[int]) -> None:
        overhead = trace.copy_overhead_ms
        self.out = _Lane(trace.d2h_bytes_per_ms, trace.d2h_both_bytes_per_ms, overhead, nbytes)
        self.back = _Lane(trace.h2d_bytes_per_ms, trace.h2d_both_bytes_per_ms, overhead, nbytes)

    def add(self, lane: _Lane, slot: int, now: float) -> None:
        self.advance(now)
        lane.queue.append(slot)
        if len(lane.queue) == 1:
            other = self._other(lane)
            if other.queue:
                other.due = now + (other.due - now) * other.slower
            self._begin(lane, now)

    def advance(self, now: float) -> None:
        while min(self.out.due, self.back.due) <= now:
            self._complete()

    def end(self, lane: _Lane, slot: int) -> float:
        """When this copy is over."""
        while lane.end[slot] == _NEVER:
            self._complete()
        return lane.end[slot]

    def _other(self, lane: _Lane) -> _Lane:
        return self.back if lane is self.out else self.out

    def _begin(self, lane: _Lane, now: float) -> None:
        slot = lane.queue[0]
        lane.start[slot] = now
        lane.due = now + lane.ms[slot] * (lane.slower if self._other(lane).queue else 1.0)

    def _complete(self) -> None:
        lane = self.out if self.out.due <= self.back.due else self.back
        slot, now = lane.queue.popleft(), lane.due
        lane.end[slot] = now
        lane.done.append(slot)
        if lane.queue:
            self._begin(lane, now)
            return
        lane.due = _NEVER
        other = self._other(lane)
        if other.queue:
            other.due = now + (other.due - now) / other.slower


def load_index(record: SavedRecord, read: int | None, release: int, prefetch: int) -> int:
    """Where the copy back is queued: on demand at the read, if the prefetch comes too late or before the release."""
    if read is None:
        return prefetch
    return read if prefetch <= release else min(prefetch, read)


def run_lanes(trace: StepTrace, placed: Sequence[Placed], modules: Iterable[Module] = ()) -> Timeline:
    """Both lanes and every wait, in the order of the step. Raises ValueError for swaps without measured bandwidth."""
    if placed and min(trace.d2h_bytes_per_ms, trace.h2d_bytes_per_ms) <= 0:
        raise ValueError("the trace has no measured bandwidth; record a step first")
    modules = list(modules)
    needed = first_reads(trace, modules)
    events = [(module.run, _RUN, m) for m, module in enumerate(modules)]  # in the order of a point
    for slot, (number, release, prefetch) in enumerate(placed):
        record = trace.saved[number]
        read = needed.get(number, record.first_read)
        events.append((record.saved, _SAVE, slot))
        events.append((release, _RELEASE, slot))
        events.append((load_index(record, read, release, prefetch), _PREFETCH, slot))
        if read is not None:
            events.append((read, _READ, slot))
    events.sort()
    keys = [trace.saved[number].key for number, _, _ in placed]
    link = _Link(trace, [trace.saved[number].nbytes for number, _, _ in placed])
    out, back = link.out, link.back
    points = trace.points
    stall = recompute = host = 0.0
    shares = {_SAVE: MOVE_HOST_MS * trace.forward_waits, _READ: MOVE_HOST_MS * trace.backward_waits}
    stalls: list[Stall] = []
    for i, event, k in events:
        now = points[i].time_ms + stall + recompute + host
        host += shares.get(event, 0.0)
        if event == _PREFETCH:
            link.add(back, k, now)
        elif event == _SAVE:
            link.add(out, k, now)
        elif event == _RUN:
            recompute += modules[k].record.forward_ms
        else:
            wait = link.end(out if event == _RELEASE else back, k) - now
            if wait > NEGLIGIBLE_MS:
                stalls.append(Stall(keys[k], i, wait, "release" if event == _RELEASE else "read"))
                stall += wait
    while link.out.queue or link.back.queue:
        link._complete()
    d2h, h2d = ([Copy(keys[k], lane.start[k], lane.end[k]) for k in lane.done] for lane in (out, back))
    return Timeline(d2h, h2d, stalls, stall, recompute, host)
