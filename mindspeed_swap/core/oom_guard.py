"""OomGuard: memory pressure -> evict saved tensors -> the allocator tries again.

Where the allocator can call us (``Accelerator.on_pressure``), a failed allocation evicts and is retried inside the
allocator: nothing is executed twice, in forward, backward and optimizer alike. Where it cannot, nothing is retried
and nothing fails over: the guard evicts ahead, at each point of the step where the room left is less than the most that
an interval between two points has needed recently.

Note: [Room for others]
The driver loads kernels and NCCL builds communicators past the allocator, at their first use, and neither can ask for
room. (A communicator takes 260 to 480 MiB on an H100, of one rank too, and Megatron's step has half a dozen.) The first
step is recorded and fills the device. So it leaves some free, which is for what forward and backward need, and gives
back what the allocator only caches when the optimizer's turn comes. If nothing is left to evict the allocator gets the
room too: then it is as without us. Later steps count what the others have by then, and leave less.
"""
from __future__ import annotations

import os
from collections.abc import Callable

from mindspeed_swap.core.accelerator.base import Interval
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.units import GIB

# How many points back a need counts as recent. One layer has a few dozen points each way; what it needed comes again
# in the next layer.
RECENT_POINTS = 256
# Left to others: in the first step, where there is one rank or there are several, and later. Of small devices, a part.
FIRST_ROOM_ALONE_BYTES, FIRST_ROOM_BYTES, ROOM_BYTES = 2 * GIB, 4 * GIB, GIB // 2
MOST_ROOM_PARTS = 16


class OomGuard:
    """Install once per manager. ``ahead`` says which of the two ways is used."""

    def __init__(self, manager: SwapManager, *, hook: bool = True) -> None:
        """``hook=False`` forces evicting ahead."""
        self._manager = manager
        self.spare: Callable[[], int] | None = None  # gives up what nothing depends on, before anything is evicted
        self._accelerator = manager.accelerator
        # Until a need has been seen: as much as the hook would leave to others.
        self._recent_bytes = self._accelerator.memory().capacity_bytes // MOST_ROOM_PARTS
        self._age = 0
        self._before_bytes = self._accelerator.memory().allocated_bytes
        self.ahead = not (hook and self._accelerator.on_pressure(self._on_pressure))
        if self.ahead:
            manager.on_interval = self._evict_ahead
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        # Of the steps to come. Without the hook nobody could take it when it is needed.
        self._rooms = [0 if self.ahead else ROOM_BYTES, FIRST_ROOM_ALONE_BYTES if alone else FIRST_ROOM_BYTES]

    def begin_step(self) -> int:
        """Returns how much of the device the step may use, in bytes."""
        if self._rooms:
            most = self._accelerator.memory().capacity_bytes // MOST_ROOM_PARTS
            self._accelerator.leave_room(min(self._rooms.pop(), most))
        return self._accelerator.memory().capacity_bytes

    def enter_optimizer(self) -> None:
        if len(self._rooms) == 1:  # the first step
            self._accelerator.empty_cache()

    def _on_pressure(self, nbytes: int, attempt: int) -> bool:
        """The allocator is out of memory. True: something was freed, try again."""
        del attempt  # the allocator bounds them
        if self.spare is not None and self.spare():
            return True
        return self._manager.evict(nbytes) > 0 or (self._manager.evicting.allowed and self._accelerator.take_room())

    def _evict_ahead(self, interval: Interval) -> None:
        # Several requests of one interval can live at once: what counts is how far it went above where it began.
        need = max(interval.peak_bytes - self._before_bytes, interval.largest_request_bytes)
        self._age += 1
        if need >= self._recent_bytes or self._age > RECENT_POINTS:
            self._recent_bytes, self._age = need, 0
            self._manager.headroom_bytes = need
        room = self._accelerator.memory().left_bytes
        if room < self._recent_bytes:
            self._manager.evict(self._recent_bytes - room)
        self._before_bytes = self._accelerator.memory().allocated_bytes

    def close(self) -> None:
        if self.ahead:
            self._manager.on_interval = None
            self._manager.headroom_bytes = 0
        else:
            self._accelerator.on_pressure(None)
