"""Timing: at which point each chosen tensor leaves, by one sweep over the step. Pure; imports no torch."""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mindspeed_swap.core.windows import View

NOT_NEEDED = -1


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
