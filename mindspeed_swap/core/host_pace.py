"""HostPace: how fast the host runs around a step, told by a loop that is always the same.

A host is not always as fast: of two threads of one core each runs at six tenths of what it does alone, and on a virtual
machine the other one is somebody else's. (H200, four layers of experts: their forward takes 35 ms or 50, for some ten
steps at a time, and so does such a loop: 0.6 ms or 1.1.) Steps in which the device waits for the host then say nothing
of the plan that they ran.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import nsmallest
from time import perf_counter

_TURNS = 4000  # 0.1 ms
# Within that of the fastest loops, the host is as fast as it can be.
MOST_SLOWNESS = 1.25
# The fastest of so many count, and of these not the first ones, which may be faster than any that follow.
_KEPT, _FASTEST = 256, 3


class HostPace:
    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._loops_ms: deque[float] = deque(maxlen=_KEPT)
        self._begun_ms = 0.0

    def begin(self) -> None:
        """Of a step."""
        self._begun_ms = self._loop()

    def end(self) -> float:
        """Of the step. What the loop takes, before it or after it, whichever is more."""
        return max(self._begun_ms, self._loop())

    @property
    def fast_ms(self) -> float:
        """What the loop takes where nothing is in its way, as far as is known."""
        return max(nsmallest(_FASTEST, self._loops_ms))

    def slowness(self) -> float:
        """``end``, as a ratio to that."""
        return self.end() / self.fast_ms

    def _loop(self) -> float:
        start = self._clock()
        for _ in range(_TURNS):
            pass
        took = 1000 * (self._clock() - start)
        self._loops_ms.append(took)
        return took
