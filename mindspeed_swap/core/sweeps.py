"""The two sweeps over a step: which tensors to swap so that memory fits, and where they leave. Pure; no torch.

Each is run on both views: forwards it finds releases, backwards prefetches."""
from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from mindspeed_swap.core.windows import View

NOT_NEEDED = -1
_NEVER = float("-inf")
_ALWAYS = float("inf")

# Pools up to this size are searched in full: what does not nest (irregular traces) is small, or costs a little more.
IRREGULAR = 16


class _Lane:
    """Busy time of a first-in-first-out lane to which copies may be added afterwards. Which times are busy depends only
    on when copies are queued, not on their order, so an added copy fills idle time from its start on, and what is left
    lengthens the backlog."""

    def __init__(self) -> None:
        self.free = 0.0  # busy or accounted for until here
        self.gap_start: list[float] = []
        self.gap_end: list[float] = []

    def idle_until(self, now: float) -> float:
        """A copy queued before this time finds some idle time."""
        if now > self.free:
            return _ALWAYS
        return self.gap_end[-1] if self.gap_end else _NEVER

    def add(self, queued: float, copy_ms: float, now: float) -> None:
        starts, ends = self.gap_start, self.gap_end
        if now > self.free:
            starts.append(self.free)
            ends.append(now)
            self.free = now
        k = bisect_right(ends, queued)
        while copy_ms > 0.0 and k < len(ends):
            begin = max(starts[k], queued)
            room = ends[k] - begin
            if copy_ms < room:
                if begin > starts[k]:
                    starts.insert(k + 1, begin + copy_ms)
                    ends.insert(k, begin)
                else:
                    starts[k] = begin + copy_ms
                copy_ms = 0.0
            else:
                copy_ms -= room
                if begin > starts[k]:
                    ends[k] = begin
                    k += 1
                else:
                    del starts[k], ends[k]
        self.free += copy_ms
        if ends and ends[-1] >= now and self.free <= now:  # the lane is still idle at present
            self.free = starts.pop()
            ends.pop()


def choose(view: View, over: Sequence[int], chosen: list[bool]) -> None:
    """Add to ``chosen`` until memory fits in every interval. ``over[i]`` is what interval ``i`` holds above the target
    when nothing is swapped (bytes, negative when it fits). Of a grade takes the furthest next use first (Belady:
    it serves the longest), and those whose copy finds idle time before those that make compute wait."""
    lane = _Lane()
    rate, times, nbytes = view.rate, view.times, view.nbytes
    start, until, easy, copy_ms, rank = view.start, view.until, view.easy, view.copy_ms, view.rank
    clock = [0.0] * view.length
    shift = 0.0
    away = away_easy = 0  # bytes of chosen windows open now; of those whose way back is still easy
    pools: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}  # heaps of what may be taken, by wave
    blocked = _NEVER  # nothing was found to be queued before this

    def best(i: int, limit: float | None) -> int | None:
        """The furthest next use, with a ``limit`` among those that are queued before it and come back easily."""
        found: tuple[int, int, int, int] | None = None
        for wave in list(pools):
            heap = pools[wave]
            while heap and (chosen[heap[0][3]] or until[heap[0][3]] <= i):
                heappop(heap)
            if not heap:
                del pools[wave]
                continue
            # A wave nests: what is used last was saved first. If the head is too late, so is the rest of it.
            for item in heap if len(heap) <= IRREGULAR else heap[:1]:
                j = item[3]
                if (found is not None and item >= found) or chosen[j] or until[j] <= i:
                    continue
                if limit is None or (clock[start[j]] < limit and easy[j] > i):
                    found = item
        return None if found is None else found[3]

    def take(j: int, i: int, now: float) -> None:
        nonlocal away, away_easy
        chosen[j] = True
        lane.add(clock[start[j]], copy_ms[j], now)
        away += nbytes[j]
        if easy[j] > i:
            away_easy += nbytes[j]

    for i in range(view.length - 1):
        now = clock[i] = times[i] + shift
        for j in view.at_start[i]:
            if chosen[j]:
                lane.add(now, copy_ms[j], now)
        for j in view.at_early[i]:
            if chosen[j]:
                away += nbytes[j]
                if easy[j] > i:
                    away_easy += nbytes[j]
            else:
                heappush(pools.setdefault(view.wave[j], []), rank[j])
                blocked = _NEVER
        for j in view.at_until[i]:
            if chosen[j]:
                away -= nbytes[j]
        for j in view.at_easy[i]:
            if chosen[j] and view.early[j] < i:
                away_easy -= nbytes[j]
        excess = over[i + 1]
        if excess <= 0:
            continue
        # Without a wait: copies that are complete, and whose way back is easy.
        while excess > max(0.0, away_easy - max(0.0, lane.free - now) * rate):
            limit = lane.idle_until(now)
            if limit <= blocked:
                break
            pick = best(i, limit)
            if pick is None:
                blocked = limit
                break
            take(pick, i, now)
        # With a wait, if it must be.
        while excess > away:
            pick = best(i, None)
            if pick is None:
                break
            take(pick, i, now)
        backlog = max(0.0, lane.free - now)
        if excess > away - backlog * rate:
            shift += min(backlog, (excess - away) / rate + backlog)


def lay_out(
    view: View, over: Sequence[int], chosen: Sequence[bool], until: Sequence[int], headroom: float
) -> list[int]:
    """The point at which each chosen job leaves (forwards: its release; backwards: its prefetch), or NOT_NEEDED.

    A job leaves at the first legal point at which its copy has been over for ``headroom`` times its duration; where
    memory is short (``over[i]`` bytes above the target with nothing away), earlier, in the order of the lane, and
    compute waits. ``until[j]``: last interval of its absence. A job that nobody needed before that never leaves.
    """
    times, early, copy_ms, nbytes = view.times, view.early, view.copy_ms, view.nbytes
    leaves = [NOT_NEEDED] * len(nbytes)
    over_at = [0.0] * len(nbytes)
    back = [0] * (view.length + 1)  # bytes whose absence ends with this interval
    waiting: dict[int, list[int]] = {}  # copied, but not yet legal
    queue: deque[int] = deque()
    shift = lane = 0.0
    away = 0

    def leave(j: int, i: int) -> None:
        nonlocal away
        if early[j] > i:
            waiting.setdefault(early[j], []).append(j)
        elif until[j] > i:
            leaves[j] = i
            away += nbytes[j]
            back[until[j]] += nbytes[j]

    for i in range(view.length - 1):
        now = times[i] + shift
        away -= back[i]
        while queue and over_at[queue[0]] + headroom * copy_ms[queue[0]] <= now:
            leave(queue.popleft(), i)
        if waiting:
            for j in waiting.pop(i, ()):
                leave(j, i)
        excess = over[i + 1]
        if excess > away and queue:
            # The shortest part of the queue that makes room; failing that, all of it that helps.
            room, count = away, 0
            for number, j in enumerate(queue, 1):
                if early[j] <= i < until[j]:
                    room += nbytes[j]
                    count = number
                    if room >= excess:
                        break
            for _ in range(count):
                j = queue.popleft()
                if over_at[j] > now:
                    shift += over_at[j] - now
                    now = over_at[j]
                leave(j, i)
        for j in view.at_start[i]:
            if chosen[j]:
                lane = over_at[j] = max(lane, now) + copy_ms[j]
                queue.append(j)
    return leaves
