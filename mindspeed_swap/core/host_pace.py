"""HostPace: how fast the host runs around a step, told by a loop that is always the same.

A host is not always as fast: of two threads of one core each runs at six tenths of what it does alone, and on a virtual
machine the other one is somebody else's. (H200, four layers of experts: their forward takes 35 ms or 50, for some ten
steps at a time, and so does such a loop: 0.6 ms or 1.1.) Steps in which the device waits for the host then say nothing
of the plan that they ran.
"""
from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

_TURNS = 4000  # 0.1 ms
# Within that of the fastest loop so far, the host is as fast as it can be.
MOST_SLOWNESS = 1.25


class HostPace:
    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._least = float("inf")  # that the loop has taken
        self._begun = 0.0

    def begin(self) -> None:
        """Of a step."""
        self._begun = self._loop()

    def end(self) -> bool:
        """Of the step. True if the host was as fast as it can be, before it and after it."""
        return max(self._begun, self._loop()) <= MOST_SLOWNESS * self._least

    def _loop(self) -> float:
        start = self._clock()
        for _ in range(_TURNS):
            pass
        took = self._clock() - start
        self._least = min(self._least, took)
        return took
