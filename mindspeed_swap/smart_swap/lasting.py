"""Lasting: whether steps of the plan that was kept have become faster than they were when it was tried. Pure.

Where the device waits for the host, and the host was slow while a plan was made and tried, copies had more time then:
later, in faster steps, compute waits for them. (H200, experts: planned from steps of 179 ms, the best plan moved 4 GB
and ran in 214; a while later it ran in 178, and one planned from such steps, which moves half as much, in 150.) Steps
that have become slower say nothing of the plan.
"""
from __future__ import annotations

from collections import deque
from statistics import median

# Of the median of so many steps, against that of the try.
STEPS = 12
FASTER_SHARE = 0.08
# So many searches may follow for it.
MOST = 2


class Lasting:
    def __init__(self) -> None:
        self._tried_ms: float | None = None  # None: nobody wants to know
        self._found: deque[float] = deque(maxlen=STEPS)
        self._searches = 0
        self.faster = False

    def begin(self, tried_ms: float) -> None:
        """The plan is kept: so long its step took when it was tried."""
        self.faster = False
        self._found.clear()
        self._tried_ms = tried_ms if self._searches < MOST else None

    def end(self, faster: bool) -> None:
        """It is no longer kept. ``faster``: as steps of some rank have become that."""
        self._searches += faster
        self._tried_ms, self.faster = None, False

    @property
    def watches(self) -> bool:
        return self._tried_ms is not None

    def add(self, step_ms: float) -> None:
        """What a step took, what the trainer does before it included."""
        if self._tried_ms is None:
            return
        self._found.append(step_ms)
        if len(self._found) == STEPS and median(self._found) < (1 - FASTER_SHARE) * self._tried_ms:
            self.faster = True
