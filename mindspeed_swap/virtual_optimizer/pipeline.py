"""Pipeline: slices of the arena pass through device buffers: on their way in, in work, on their way out.

Three buffers keep the link busy both ways during a step. Where the step around it has room (overlap.py), more slices
come in before the step, and the last ones are still on their way out after it.

Note: [When a slice leaves]
While copies in are still to be waited for, copies out cost nothing: they take the link's other direction. After that
they are only begun in the next forward, where there is room to wait. A trainer reads figures of the step from the
device as soon as it is over (Megatron: the gradient norm), and such a read is a copy out, behind all others.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event, Stream
from mindspeed_swap.virtual_optimizer.slices import Slice
from mindspeed_swap.virtual_optimizer.waits import Wait

BUFFERS = 3
# Slices that are there before they are wanted are stepped so many at once: each call of the optimizer takes the host a
# third of a millisecond, half of what a slice takes the link.
BATCH = 8

Streams = tuple[Stream, Stream]  # for copies in, for copies out


@dataclass(eq=False, slots=True)
class _Buffer:
    """``stream``: whose memory it is. ``event``: behind its last copy; of one that has been stepped, behind that."""

    memory: torch.Tensor
    stream: Stream
    event: Event = None
    holds: Slice | None = None


class Pipeline:
    """``host``: the arena, flat uint8, registered.

    Note: [Giving buffers up]
    An allocation may run the pressure handler, in any thread, which calls ``give_up``. The lock is held while the
    queues change, and while a buffer is allocated for them: then nothing is given up.
    """

    def __init__(
        self,
        host: torch.Tensor,
        accelerator: Accelerator,
        streams: Streams,
        skip_waits: frozenset[Wait] = frozenset(),
    ) -> None:
        self.slice_bytes = 0  # of a buffer
        self.early_bytes = self.late_bytes = 0  # of the last step: in before it began, not yet out at its end
        self.comes_ahead = True  # False: what a step finds in host memory may change until it begins
        self.stepped = False  # since somebody last set this to False
        self._host = host
        self._slices: list[Slice] = []
        self._accelerator = accelerator
        self._h2d, self._d2h = streams
        self._skip_waits = skip_waits
        self._next = 0  # the slice that is stepped next
        self._in: deque[_Buffer] = deque()  # of the next slices
        self._stepped: deque[_Buffer] = deque()  # the copy out is not begun
        self._out: deque[_Buffer] = deque()  # before all of ``_stepped``
        self._later_bytes = 0  # of buffers that may wait for the next forward
        self._free_copies = 0  # out, while copies in are waited for
        self._lock = threading.Lock()
        self._running = False

    def take(self, slices: list[Slice]) -> None:
        """Of the arena, in the order in which they are stepped, in place of those before. Between steps."""
        self.shrink(0)
        self._slices, self.slice_bytes = slices, max((each.nbytes for each in slices), default=0)

    @property
    def held_bytes(self) -> int:
        return (len(self._in) + len(self._stepped) + len(self._out)) * self.slice_bytes

    @property
    def wants_more(self) -> bool:
        return self._next + len(self._in) < len(self._slices)

    @property
    def next_buffer_bytes(self) -> int:
        """What ``load_ahead`` would allocate: nothing while there is a buffer on its way out, which it takes."""
        return 0 if self._out or self._stepped else self.slice_bytes

    # ---- the step
    @contextmanager
    def running(self, may_keep: Callable[[], int], later_bytes: int = 0) -> Iterator[None]:
        """Around the step. At the end all is in host memory in the order of the compute stream, but for buffers of
        ``may_keep()`` bytes, whose slices are still to leave. ``later_bytes``: of buffers that may stay until
        ``store`` is called, if the step's end lets them. Raises torch.OutOfMemoryError."""
        kept = 0
        self.stepped = True
        try:
            with self._lock:
                self._running = True
                self._store(len(self._stepped))
                self.early_bytes = sum(each.nbytes for each in self._slices[: len(self._in)])
                self._later_bytes, self._free_copies = later_bytes, len(self._slices) - self._loaded()
                while self.wants_more and (self._out or len(self._in) < BUFFERS):
                    self._load(self._out_or_new_buffer())
            yield
            kept = may_keep()
        finally:
            with self._lock:
                self._running = False
                self._next = 0
                self._drop_in(0)  # if the step has failed
                self._shrink_out(kept)
                left = (*self._out, *self._stepped)
                self.late_bytes = sum(buffer.holds.nbytes for buffer in left if buffer.holds)

    def batch(self, slices: list[Slice]) -> int:
        """How many of the next slices to step at once."""
        return min(len(slices), BATCH, max(1, len(self._in) // BUFFERS))

    @contextmanager
    def on_device(self, slices: list[Slice]) -> Iterator[list[torch.Tensor]]:
        """The buffers that hold the next slices, in the order of the compute stream. They are stored if nothing is
        raised."""
        assert self._slices[self._next] is slices[0]
        accelerator, compute = self._accelerator, self._accelerator.compute_stream()
        with self._lock:
            while len(self._in) < len(slices):  # some were given up
                self._load(self._out_or_new_buffer())
            buffers = [self._in.popleft() for _ in slices]
            self._next += len(slices)
        self._wait(Wait.STEP_AFTER_LOAD, compute, buffers[-1].event)  # copies in are in order
        yield [buffer.memory for buffer in buffers]
        event = accelerator.record(compute)
        with self._lock:
            for buffer in buffers:
                buffer.event = event
            self._stepped.extend(buffers)
            hurry, self._free_copies = self._free_copies, max(0, self._free_copies - len(buffers))
            self._store(max(min(hurry, len(buffers)), len(self._stepped) - self._later_bytes // self.slice_bytes))
            while self.wants_more and self._out:
                self._load(self._out_or_new_buffer())

    # ---- around the step
    def store(self, most: int) -> None:
        """Begin the copies out of so many slices that have been stepped."""
        if self._stepped:
            with self._lock:
                self._store(most)

    def load_ahead(self) -> bool:
        """Begin to copy the next slice in. False: all are, or there is no memory.

        A buffer that is still to leave holds a slice of the step before, which leaves after the one that now comes in:
        behind its copy out that one is in host memory.
        """
        with self._lock:
            if not self.wants_more:
                return False
            try:
                self._load(self._out_or_new_buffer())
            except torch.OutOfMemoryError:
                return False
            return True

    def shrink(self, most_bytes: int) -> None:
        """Give up what has left. Then, until ``most_bytes`` are held: wait for what leaves, and drop what came in."""
        with self._lock:
            while self._out and self._accelerator.done(self._out[0].event):
                self._out.popleft()
            self._shrink_out(most_bytes - len(self._in) * self.slice_bytes)
            self._drop_in(most_bytes)

    def give_up(self) -> int:
        """Under memory pressure. Returns the bytes. A step that runs keeps the buffers that it needs: it could not be
        ended without, and parameters would be left of which some were updated and some were not."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            held, needed = self.held_bytes, BUFFERS * self.slice_bytes if self._running else 0
            self._drop_in(needed)
            self._shrink_out(needed - len(self._in) * self.slice_bytes)
            return held - self.held_bytes
        finally:
            self._lock.release()

    # ---- below: lock held
    def _loaded(self) -> int:
        """How many slices are in, as far as the device has come. Copies in are in order."""
        for count in range(len(self._in), 0, -1):
            if self._accelerator.done(self._in[count - 1].event):
                return count
        return 0

    def _store(self, most: int) -> None:
        after = None  # of the last wait: slices that were stepped at once have one event
        for _ in range(min(most, len(self._stepped))):
            buffer = self._stepped[0]
            if buffer.event is not after:
                self._wait(Wait.STORE_AFTER_STEP, self._d2h, after := buffer.event)
            assert buffer.holds is not None
            for start, offset, nbytes in buffer.holds.ranges:
                target = self._host[start : start + nbytes]
                self._accelerator.copy(target, buffer.memory[offset : offset + nbytes], self._d2h)
            buffer.event = self._accelerator.record(self._d2h)
            self._out.append(self._stepped.popleft())

    def _shrink_out(self, most_bytes: int) -> None:
        excess = len(self._out) + len(self._stepped) - max(0, most_bytes) // max(1, self.slice_bytes)
        self._store(excess - len(self._out))
        for _ in range(excess):
            self._wait_to_free(Wait.END_AFTER_STORE, self._out.popleft())

    def _drop_in(self, most_bytes: int) -> None:
        while self._in and len(self._in) * self.slice_bytes > most_bytes:
            self._wait_to_free(Wait.DROP_AFTER_LOAD, self._in.pop())

    def _wait_to_free(self, wait: Wait, buffer: _Buffer) -> None:
        compute = self._accelerator.compute_stream()
        for stream in (buffer.stream,) if buffer.stream == compute else (buffer.stream, compute):
            self._wait(wait, stream, buffer.event)

    def _out_or_new_buffer(self) -> _Buffer:
        if not self._out:
            self._store(1)
        if not self._out:
            return self._new_buffer()
        buffer = self._out.popleft()
        self._wait(Wait.REFILL_AFTER_STORE, self._h2d, buffer.event)
        return buffer

    def _new_buffer(self) -> _Buffer:
        buffer = _Buffer(self._accelerator.empty(self.slice_bytes), self._accelerator.compute_stream())
        self._wait(Wait.LOAD_AFTER_COMPUTE, self._h2d, self._accelerator.record(buffer.stream))
        return buffer

    def _load(self, buffer: _Buffer) -> None:
        following = self._slices[self._next + len(self._in)]
        for start, offset, nbytes in following.ranges:
            source = self._host[start : start + nbytes]
            self._accelerator.copy(buffer.memory[offset : offset + nbytes], source, self._h2d)
        buffer.event, buffer.holds = self._accelerator.record(self._h2d), following
        self._in.append(buffer)

    def _wait(self, wait: Wait, stream: Stream, event: Event) -> None:
        if wait not in self._skip_waits:
            self._accelerator.wait(stream, event)
