"""Windows: which saved tensors may be swapped, from when until when, seen forwards or backwards in time. No torch.

Going backwards, a swap is a swap again: the copy back "is queued" at the read, must be over before the prefetch point,
and the memory is away until the release. So the planner writes every sweep once and runs it on two views.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindspeed_swap.core.recompute import Module, first_reads
from mindspeed_swap.core.simulate import position_index
from mindspeed_swap.core.trace import BACKWARD, FORWARD, OUTSIDE, SavedRecord, StepTrace

# Tensors of one layer are told apart by size rather than by next use while their reads lie closer together than this
# share of the time they can be away: fewer copies, and the difference in window is not worth one.
SAME_USE_SHARE = 0.25
LARGEST_BITS = 64  # more than any tensor's bytes have
# Where the device waits for the host at more of the points of forward than that, the host's time counts.
WAITS_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Window:
    """A swap that would be legal: released at a point in [release, prefetch), prefetched at one in (release, prefetch].
    All are indices of points."""

    record: int
    nbytes: int
    saved: int
    release: int  # earliest
    prefetch: int  # latest
    read: int


def windows(trace: StepTrace) -> list[Window]:
    """Every candidate, in the order of ``trace.saved``."""
    acts = points_to_act(trace)
    found: list[Window] = []
    for number, record in enumerate(trace.saved):
        if is_candidate(record):
            assert record.sole is not None and record.first_read is not None
            release = max(record.last_use + 1, record.sole, record.saved + 1)
            found += _window(acts, number, record.nbytes, record.saved, release, record.first_read)
    return found


def windows_left(trace: StepTrace, jobs: list[Window], modules: Sequence[Module], acts: list[int]) -> list[Window]:
    """Those of ``jobs`` that are left, and as long as they are left, when ``modules`` are recomputed."""
    freed = {number for module in modules for number in module.frees}
    needed = first_reads(trace, modules)
    found: list[Window] = []
    for job in jobs:
        if job.record in needed and job.record not in freed:
            found += _window(acts, job.record, job.nbytes, job.saved, job.release, needed[job.record])
        elif job.record not in freed:
            found.append(job)
    return found


def _window(acts: list[int], record: int, nbytes: int, saved: int, release: int, read: int) -> list[Window]:
    """The window from ``release`` on until before ``read``, if there is one."""
    first, last = bisect_left(acts, release), bisect_left(acts, read) - 1
    return [Window(record, nbytes, saved, acts[first], acts[last], read)] if first < last else []


def points_to_act(trace: StepTrace) -> list[int]:
    """Those that are the first of their position: that is where the manager acts."""
    return list(position_index(trace).values())


def link_rates(trace: StepTrace) -> tuple[float, float]:
    """Bytes per ms out and back that a plan can count on: those of a link used both ways where forwards and backwards
    alternate (more than one microbatch), else those of one way."""
    phases = [point.position.phase for point in trace.points]
    first = phases.index(BACKWARD) if BACKWARD in phases else len(phases)
    if FORWARD in phases[first:]:
        return (
            trace.d2h_both_bytes_per_ms or trace.d2h_bytes_per_ms,
            trace.h2d_both_bytes_per_ms or trace.h2d_bytes_per_ms,
        )
    return trace.d2h_bytes_per_ms, trace.h2d_bytes_per_ms


def is_candidate(record: SavedRecord) -> bool:
    """May move, is ours alone at some point, is read again and ends."""
    return (
        record.movable
        and record.nbytes > 0
        and record.sole is not None
        and record.first_read is not None
        and record.died is not None
        and record.died >= record.first_read
    )


class View:
    """The windows in one direction of time. Job ``j`` is ``windows[j]`` in both; points count from 0 in each."""

    def __init__(
        self, trace: StepTrace, jobs: list[Window], modules: Sequence[Module], last_resort: set[int], backwards: bool
    ) -> None:
        """``modules`` run again in backward. The record numbers ``last_resort`` are better freed in another way."""
        n = len(trace.points)
        self.length = n
        times = [point.time_ms for point in trace.points]
        if modules:
            spent = [0.0] * (n + 1)
            for module in modules:
                spent[module.run + 1] += module.record.forward_ms
            times = [time + more for time, more in zip(times, accumulate(spent), strict=False)]
        there, back = link_rates(trace)
        if backwards:
            end = times[-1] if times else 0.0
            times = [end - time for time in reversed(times)]
            there, back = back, there
            self.start = [n - 1 - job.read for job in jobs]
            self.early = [n - 1 - job.prefetch for job in jobs]
            self.until = [n - 1 - job.release for job in jobs]
            opposite = [n - 1 - job.saved for job in jobs]
        else:
            self.start = [job.saved for job in jobs]
            self.early = [job.release for job in jobs]
            self.until = [job.prefetch for job in jobs]
            opposite = [job.read for job in jobs]
        self.times = times
        self.rate = there
        self.nbytes = [job.nbytes for job in jobs]
        self.copy_ms = [trace.copy_overhead_ms + job.nbytes / there for job in jobs]
        # The last point up to which the memory can be away if the copy of the other lane is alone on it.
        self.easy = [
            min(until, bisect_right(times, times[at] - nbytes / back) - 1)
            for until, at, nbytes in zip(self.until, opposite, self.nbytes, strict=True)
        ]
        # The host's time every copy takes alike: where it counts, the largest first.
        waits = trace.forward_waits > WAITS_SHARE
        grade = [LARGEST_BITS * (job.record in last_resort) - waits * job.nbytes.bit_length() for job in jobs]
        self.rank = [(g, *rank) for g, rank in zip(grade, self._ranks(trace, jobs), strict=True)]
        # What nests: one grade of one microbatch and chunk.
        self.wave = [(*trace.saved[job.record].key[:2], g) for g, job in zip(grade, jobs, strict=True)]
        self.at_start = self._at(self.start)
        self.at_early = self._at(self.early)
        self.at_until = self._at(self.until)
        self.at_easy = self._at(self.easy)

    def _at(self, where: list[int]) -> list[list[int]]:
        table: list[list[int]] = [[] for _ in range(self.length)]
        for j, i in enumerate(where):
            if i >= 0:  # a copy may be too long to be back easily at any point
                table[i].append(j)
        return table

    def _ranks(self, trace: StepTrace, jobs: list[Window]) -> list[tuple[int, int, int]]:
        """Sort keys in a grade: furthest next use first, in one layer the largest first, then in order."""
        blocks: dict[tuple[int, int, int], list[int]] = {}
        for j, job in enumerate(jobs):
            key = trace.saved[job.record].key
            if key.layer != OUTSIDE:
                blocks.setdefault(key[:3], []).append(j)
        use = list(self.until)
        for block in blocks.values():
            first, last = min(self.until[j] for j in block), max(self.until[j] for j in block)
            shortest = min(self.times[self.until[j]] - self.times[self.early[j]] for j in block)
            if self.times[last] - self.times[first] <= SAME_USE_SHARE * shortest:
                for j in block:
                    use[j] = last
        return [(-use[j], -self.nbytes[j], j) for j in range(len(jobs))]
