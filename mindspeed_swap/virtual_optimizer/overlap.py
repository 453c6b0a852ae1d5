"""Overlap: streamed state comes in while the last backward frees activations, and leaves during the next forward.

A step is a sequence of points: its begin, each layer and the end of each forward, each layer's backward, the optimizer,
its end. What the step itself allocates at most after each point, without our buffers, is learnt from the step before.
The highest of these figures is the step's peak, and the limit: buffers fill what is free below it, so they cost no
memory. From the end of the last forward on slices come in as far as the rest of the step leaves room; after the
optimizer's step the last ones leave, and their buffers are given up as they do, or as soon as the room is wanted.

If a step takes another course than the one before, everything is at rest until its end. If an allocation fails all the
same, ``give_up`` is called by the allocator; without such a call (no allocator hook) there is no overlap.

Activations have the link first: while one is on the host or on its way back no state comes in, and in steps that copy
activations out the state has left when the optimizer's step ends.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.virtual_optimizer.pipeline import BATCH, Pipeline

BEGIN, FORWARD, BACKWARD, OPTIMIZER, END = "begin", "forward", "backward", "optimizer", "end"


class Room:
    """What a step leaves free below its own peak, by the step before. In bytes; our own buffers do not count."""

    def __init__(self, optimizer_margin_bytes: int = 0) -> None:
        """The margin: by how much more the optimizer may allocate than it did."""
        self._margin = optimizer_margin_bytes
        self._last: list[tuple[str, int]] = []  # of the step before: point, most bytes until the next point
        self._last_forward = 0
        self._rest: list[int] = []  # most bytes until the step's end
        self._limit = 0
        self._points: list[str] = []
        self._peaks: list[int] = []
        self._as_before = False

    def begin(self) -> None:
        """Of a step. What ``peak`` has been told since its last point is of the step before."""
        self._last = list(zip(self._points, self._peaks, strict=True))
        inside = [peak + self._margin * (kind == OPTIMIZER) for kind, peak in self._last[:-1]]  # after the end: not in
        self._rest = [max(inside[at:], default=0) for at in range(len(self._last))]
        self._limit = max((peak for _, peak in self._last[:-1]), default=0)
        self._last_forward = max((at for at, (kind, _) in enumerate(self._last) if kind == FORWARD), default=0)
        self._points, self._peaks = [], []
        self._as_before = bool(self._last)

    def point(self, kind: str) -> None:
        at = len(self._points)
        self._as_before = self._as_before and at < len(self._last) and self._last[at][0] == kind
        self._points.append(kind)

    def peak(self, nbytes: int) -> None:
        """Of the interval after the last point."""
        if len(self._peaks) < len(self._points):
            self._peaks.append(nbytes)

    def forget(self) -> None:
        self._points, self._peaks, self._as_before = [], [], False

    @property
    def free_bytes(self) -> int:
        """Until the next point."""
        return max(0, self._limit - self._last[len(self._points) - 1][1]) if self._as_before else 0

    @property
    def ahead_bytes(self) -> int:
        """Until the end of the step, once the last forward is over."""
        at = len(self._points) - 1
        return max(0, self._limit - self._rest[at]) if self._as_before and at >= self._last_forward else 0


class Overlap:
    """Of all pipelines of a rank. ``manager``: whose copies of activations go first, if there are any."""

    def __init__(
        self, accelerator: Accelerator, pipelines: Sequence[Pipeline], manager: SwapManager | None = None
    ) -> None:
        self._accelerator = accelerator
        self._pipelines = pipelines
        self._manager = manager
        self._room = Room(max((BATCH * each.slice_bytes for each in pipelines), default=0))
        self._before = 0  # bytes of our buffers since the last point
        self._active = self._in_forward = False

    @property
    def _held(self) -> int:
        return sum(each.held_bytes for each in self._pipelines)

    # ---- called in the course of a step
    @contextmanager
    def step(self, active: bool) -> Iterator[None]:
        """``active`` False: nothing is learnt, and all is at rest outside the optimizer's step."""
        if not active:
            self._forget()
            yield
            return
        self._active = True
        try:
            self._point(BEGIN)
            yield
            for pipeline in self._pipelines:
                pipeline.drop_ahead()  # the optimizer's step was left out: the gradients were not finite
            self._point(END)
        except BaseException:
            self._forget()
            raise
        finally:
            self._active = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Of one microbatch."""
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False
        self._point(FORWARD)

    def layer(self, entering: torch.Tensor) -> None:
        """A layer begins. In a backward, where it is recomputed, that is no point; the end of its backward is one."""
        if self._in_forward:
            self._point(FORWARD)
        if self._active and entering.requires_grad and torch.is_grad_enabled():
            entering.register_hook(lambda gradient: self._point(BACKWARD))

    def optimizer(self) -> None:
        self._point(OPTIMIZER)

    def may_keep(self, pipeline: Pipeline) -> int:
        """Bytes of its buffers that may still be on their way out when its optimizer's step ends."""
        if not self._active or (self._manager and self._manager.stats.offloaded_bytes):
            return 0
        return max(0, self._room.free_bytes - (self._held - pipeline.held_bytes))

    # ---- called at any time
    def settle(self) -> None:
        """No buffers: the state at rest is all there is, in the order of the compute stream."""
        for pipeline in self._pipelines:
            pipeline.shrink(0)

    def give_up(self) -> int:
        """For the allocator, when it has no memory left: what was learnt does not hold. Returns the bytes."""
        freed = sum(pipeline.give_up() for pipeline in self._pipelines)
        if freed:
            self._room.forget()
        return freed

    # ---- points
    def _forget(self) -> None:
        self.settle()
        self._room.forget()

    def _point(self, kind: str) -> None:
        if self._manager and self._manager.recorder:  # a plan for another shape is made: the peaks are its
            self._active = False
            self._forget()
        if not self._active:
            return
        self._room.peak(self._accelerator.take_interval().peak_bytes - self._before)
        if kind == BEGIN:
            self._room.begin()
        self._room.point(kind)
        if self._held:
            self._shrink(self._room.free_bytes)
        if kind in (BACKWARD, FORWARD):
            self._load_ahead(self._room.ahead_bytes)
        if self._before != self._held:  # what was there before is not part of the next interval's peak
            self._before = self._held
            self._accelerator.take_interval()

    def _shrink(self, most_bytes: int) -> None:
        for pipeline in self._pipelines:
            pipeline.shrink(max(0, most_bytes - (self._held - pipeline.held_bytes)))

    def _load_ahead(self, most_bytes: int) -> None:
        if self._manager and (self._manager.bytes_in[State.HOST] or self._manager.bytes_in[State.RETURNING]):
            return
        for pipeline in self._pipelines:
            while pipeline.wants_more:
                size = pipeline.next_buffer_bytes
                if self._held + size > most_bytes or not self._fits(size) or not pipeline.load_ahead():
                    return

    def _fits(self, nbytes: int) -> bool:
        """A buffer that would need eviction is left for the optimizer's step."""
        memory = self._accelerator.memory()
        return memory.capacity_bytes - memory.allocated_bytes >= nbytes
