"""OomGuard: memory pressure -> evict saved tensors -> the allocator tries again.

Where the allocator can call us (``Accelerator.on_pressure``), a failed allocation evicts and is retried inside the
allocator: nothing is executed twice, in forward, backward and optimizer alike. Where it cannot, nothing is retried
and nothing fails over: the guard evicts ahead, at each point of the step where the room left is less than the most that
an interval between two points has needed recently.
"""
from __future__ import annotations

from collections.abc import Callable

from mindspeed_swap.core.accelerator.base import Interval
from mindspeed_swap.core.swap_manager import SwapManager

# How many points back a need counts as recent. One layer has a few dozen points each way; what it needed comes again
# in the next layer.
RECENT_POINTS = 256


class OomGuard:
    """Install once per manager. ``ahead`` says which of the two ways is used."""

    def __init__(self, manager: SwapManager, *, hook: bool = True) -> None:
        """``hook=False`` forces evicting ahead."""
        self._manager = manager
        self.spare: Callable[[], int] | None = None  # gives up what nothing depends on, before anything is evicted
        self._accelerator = manager.accelerator
        self._recent_bytes = 0
        self._age = 0
        self._before_bytes = self._accelerator.memory().allocated_bytes
        self.ahead = not (hook and self._accelerator.on_pressure(self._on_pressure))
        if self.ahead:
            manager.on_interval = self._evict_ahead

    def _on_pressure(self, nbytes: int, attempt: int) -> bool:
        """The allocator is out of memory. True: something was freed, try again."""
        del attempt  # the allocator bounds them
        if self.spare is not None and self.spare():
            return True
        return self._manager.evict(nbytes) > 0

    def _evict_ahead(self, interval: Interval) -> None:
        # Several requests of one interval can live at once: what counts is how far it went above where it began.
        need = max(interval.peak_bytes - self._before_bytes, interval.largest_request_bytes)
        self._age += 1
        if need >= self._recent_bytes or self._age > RECENT_POINTS:
            self._recent_bytes, self._age = need, 0
            self._manager.headroom_bytes = need
        memory = self._accelerator.memory()
        room = memory.capacity_bytes - memory.allocated_bytes
        if room < self._recent_bytes:
            self._manager.evict(self._recent_bytes - room)
        self._before_bytes = self._accelerator.memory().allocated_bytes

    def close(self) -> None:
        if self.ahead:
            self._manager.on_interval = None
            self._manager.headroom_bytes = 0
        else:
            self._accelerator.on_pressure(None)
