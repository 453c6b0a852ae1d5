"""Overlap: streamed state comes in while the last backward frees activations, and leaves during the next forward.

A step is a sequence of points: its begin, each layer and the end of each forward, each layer's backward, the optimizer,
the end of each optimizer's own step, its end. What the step itself allocates at most after each point, without our
buffers, is learnt from the step before. The highest of these figures is the step's peak, and the limit: buffers fill
what is free below it, so they cost no memory. From the end of the last forward on slices come in as far as the rest of
the step leaves room; after the optimizer's step the last ones leave, and their buffers are given up as they do, or as
soon as the room is wanted.

If a step takes another course than the one before, everything is at rest until its end. A step without an update tells
nothing of what one needs: the next one learns anew. If an allocation fails all the same, ``give_up`` is called by the
allocator; without such a call (no allocator hook) there is no overlap. If that happens again, the steps that follow go
without, twice as many each time.

Activations have the link first: while one is on the host or on its way back no state comes in, and in steps that copy
activations out the state has left when the optimizer's step ends.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.virtual_optimizer.pipeline import BATCH, Pipeline

BEGIN, FORWARD, BACKWARD, OPTIMIZER, UPDATED, END = "begin", "forward", "backward", "optimizer", "updated", "end"
# Slices, at a point: enough to keep the link busy until the host is at the next one, few enough not to hold it up.
STORED_AT_ONCE = 32


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
        self._held_at_point = 0  # bytes of our buffers since the last point
        self._active = self._in_forward = self._loading = False
        self._pause = self._next_pause = 0  # steps without, after an allocation has failed

    @property
    def _held(self) -> int:
        return sum(each.held_bytes for each in self._pipelines)

    # ---- called in the course of a step
    @contextmanager
    def step(self, active: bool) -> Iterator[None]:
        """``active`` False: nothing is learnt, and all is at rest outside the optimizer's step."""
        if self._pause:
            self._pause, active = self._pause - 1, False
        if not active:
            self._forget()
            yield
            return
        self._active = True
        try:
            for pipeline in self._pipelines:
                pipeline.stepped, pipeline.early_bytes, pipeline.late_bytes = False, 0, 0
            self._point(BEGIN)
            yield
            self._point(END)
            if not all(pipeline.stepped for pipeline in self._pipelines):  # the gradients were not finite
                self._forget()
        except BaseException:
            with contextlib.suppress(Exception):  # the device may be the reason
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
        """Its optimizer's step ends. Bytes of its buffers that may still be on their way out then."""
        self._point(UPDATED)  # what follows, as making the model's parameters, needs its own room
        return self._left_for(pipeline, self._room.free_bytes) if self._late else 0

    def later_bytes(self, pipeline: Pipeline) -> int:
        """Its optimizer's step begins. Bytes of its buffers whose copies out may begin after the step."""
        return self._left_for(pipeline, self._room.ahead_bytes) if self._late else 0

    @property
    def _late(self) -> bool:
        """State may leave after the optimizer's step."""
        return self._active and not (self._manager and self._manager.stats.offloaded_bytes)

    # ---- called at any time
    def came_to_rest(self) -> None:
        """Somebody has looked into the state. In a step that takes buffers away between two points."""
        if self._active:
            self._room.forget()

    def settle(self) -> None:
        """No buffers: the state at rest is all there is, in the order of the compute stream."""
        for pipeline in self._pipelines:
            pipeline.shrink(0)

    def give_up(self) -> int:
        """For the allocator, when it has no memory left: what was learnt does not hold. Returns the bytes."""
        if self._loading:
            return 0  # a buffer of our own has failed
        freed = sum(pipeline.give_up() for pipeline in self._pipelines)
        if freed:
            self._room.forget()
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause or 1
        return freed

    # ---- points
    def _forget(self) -> None:
        self._room.forget()
        self.settle()

    def _point(self, kind: str) -> None:
        if self._manager and self._manager.recorder:  # a plan for another shape is made: the peaks are its
            self._active = False
            self._forget()
        if not self._active:
            return
        self._room.peak(self._accelerator.take_interval().peak_bytes - self._held_at_point)
        if kind == BEGIN:
            self._room.begin()
        self._room.point(kind)
        if self._held:
            self._shrink(self._room.free_bytes)
        if kind in (BACKWARD, FORWARD):
            for pipeline in self._pipelines:
                pipeline.store(STORED_AT_ONCE)
            self._load_ahead(self._room.ahead_bytes)
        if self._held_at_point != self._held:  # what was there before is not part of the next interval's peak
            self._held_at_point = self._held
            self._accelerator.take_interval()

    def _left_for(self, pipeline: Pipeline, most_bytes: int) -> int:
        """Of what all may hold."""
        return max(0, most_bytes - (self._held - pipeline.held_bytes))

    def _shrink(self, most_bytes: int) -> None:
        for pipeline in self._pipelines:
            pipeline.shrink(self._left_for(pipeline, most_bytes))

    def _load_ahead(self, most_bytes: int) -> None:
        if self._manager and (self._manager.bytes_in[State.HOST] or self._manager.bytes_in[State.RETURNING]):
            return
        self._loading = True
        try:
            # A buffer that would push activations out is left for the optimizer's step.
            with self._manager.evicting.off() if self._manager else contextlib.nullcontext():
                for pipeline in self._pipelines:
                    while pipeline.comes_ahead and pipeline.wants_more:
                        size = pipeline.next_buffer_bytes
                        if self._held + size > most_bytes or not self._fits(size) or not pipeline.load_ahead():
                            break
        finally:
            self._loading = False

    def _fits(self, nbytes: int) -> bool:
        """Asked first: an allocation that fails costs more."""
        return self._accelerator.memory().left_bytes >= nbytes
