"""Windows: which saved tensors may be swapped, from when until when, seen forwards or backwards in time. No torch.

Going backwards, a swap is a swap again: the copy back "is queued" at the read, must be over before the prefetch point,
and the memory is away until the release. So the planner writes every sweep once and runs it on two views.
"""
from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice

from mindspeed_swap.core.simulate import position_index
from mindspeed_swap.core.trace import OUTSIDE, SavedRecord, StepTrace

# Tensors of one layer are told apart by size rather than by next use while their reads lie closer together than this
# share of the time they can be away: fewer copies, and the difference in window is not worth one.
SAME_USE_SHARE = 0.25


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
    """Every candidate, in the order of ``trace.saved``. Acts only at points that are the first of their position: that
    is where the manager acts."""
    index = position_index(trace)
    acts = [index[point.position] == i for i, point in enumerate(trace.points)]
    found: list[Window] = []
    for number, record in enumerate(trace.saved):
        if not is_candidate(record):
            continue
        assert record.sole is not None and record.first_read is not None
        release = max(record.last_use + 1, record.sole, record.saved + 1)
        prefetch = min(record.first_read - 1, len(trace.points) - 1)
        while release < prefetch and not acts[release]:
            release += 1
        while release < prefetch and not acts[prefetch]:
            prefetch -= 1
        if release < prefetch:
            found.append(Window(number, record.nbytes, record.saved, release, prefetch, record.first_read))
    return found


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

    def __init__(self, trace: StepTrace, jobs: list[Window], backwards: bool) -> None:
        n = len(trace.points)
        self.length = n
        times = [point.time_ms for point in trace.points]
        there, back = trace.d2h_bytes_per_ms, trace.h2d_bytes_per_ms
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
        self.copy_ms = [job.nbytes / there for job in jobs]
        # The last point up to which the memory can be away if the copy of the other lane is alone on it.
        self.easy = [
            min(until, bisect_right(times, times[at] - nbytes / back) - 1)
            for until, at, nbytes in zip(self.until, opposite, self.nbytes, strict=True)
        ]
        self.rank = self._ranks(trace, jobs)
        self.wave = [trace.saved[job.record].key[:2] for job in jobs]  # microbatch, chunk
        self.at_start = self._at(self.start)
        self.at_early = self._at(self.early)
        self.at_until = self._at(self.until)
        self.at_easy = self._at(self.easy)

    def _at(self, where: list[int]) -> list[list[int]]:
        empty: list[int] = []
        table = [empty] * self.length
        for j, i in enumerate(where):
            if i < 0:
                continue
            if table[i] is empty:
                table[i] = []
            table[i].append(j)
        return table

    def _ranks(self, trace: StepTrace, jobs: list[Window]) -> list[tuple[int, int, int]]:
        """Sort keys: furthest next use first, in one layer the largest first, then the order of the trace."""
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


class RangeMin:
    """Least value of a slice of a list that does not change, in constant time."""

    def __init__(self, values: list[int]) -> None:
        self.levels = [values]
        width = 1
        while 2 * width <= len(values):
            level = self.levels[-1]
            self.levels.append(list(map(min, level, islice(level, width, None))))
            width *= 2

    def __call__(self, first: int, last: int) -> int:
        """Least of ``values[first : last + 1]``, which must not be empty."""
        depth = (last - first + 1).bit_length() - 1
        level = self.levels[depth]
        return min(level[first], level[last + 1 - (1 << depth)])
