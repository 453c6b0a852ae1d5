"""Mover: the moves of one saved tensor between device and host, and the books about where bytes are.

Each move queues its copy, names the waits that make it safe (waits.py), changes the state and tells the observers. What
to move, and when, is the manager's business. Everything here but ``load`` is called with the manager's lock held;
nothing here allocates device memory but ``load``, which does so before it takes the lock.

Note: [Whose stream]
Device memory belongs to the stream it was allocated for, and is recycled there as soon as it is given up. So a copy is
waited for on that stream, whichever stream the thread that gives it up is on: under memory pressure that is any.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar, cast

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Bytes, Event, Stream
from mindspeed_swap.core.again import Call
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.recorder import Recorder, is_sole_holder, sole_holder_count
from mindspeed_swap.core.saved_tensor import SavedTensor, State, over
from mindspeed_swap.core.spans import span
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.core.trace import FORWARD
from mindspeed_swap.core.waits import Wait

# Below this, a wait is the time between two marks, not a wait.
LATE_MS = 0.02

Observer = Callable[[SavedTensor, "State | None"], None]
_Move = TypeVar("_Move", bound=Callable[..., Any])


def _timed(move: _Move) -> _Move:
    """A recorded step is told as if nothing had moved in it, so what moves take the host is to be known."""

    @functools.wraps(move)
    def timed(self: Mover, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            return move(self, *args, **kwargs)
        start = perf_counter()
        try:
            return move(self, *args, **kwargs)
        finally:
            recorder.took_since(start, moving=True)

    return cast(_Move, timed)


class Mover:
    def __init__(
        self,
        accelerator: Accelerator,
        pool: HostPool,
        lock: threading.RLock,
        skip_waits: frozenset[Wait],
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        """``streams``: for copies out and back; new ones of its own if not given."""
        self.accelerator = accelerator
        self.pool = pool
        self.stats = StepStats()
        self.recorder: Recorder | None = None
        self.bytes_in: dict[State, int] = dict.fromkeys(State, 0)
        self._live_bytes = 0
        self.observers: list[Observer] = []
        self.leaving: dict[int, SavedTensor] = {}  # by serial
        self.gave_up = False  # device memory, since the manager last set this to False
        self._lock = lock
        self._skip_waits = skip_waits
        self._d2h, self._h2d = streams or (accelerator.new_stream(), accelerator.new_stream())
        self._sole_count = sole_holder_count()
        # Memory of dead tensors that a copy still uses, and the stream it belongs to.
        self.lingering: list[tuple[Event, torch.Tensor, Stream]] = []
        self._reads: list[tuple[Event, Event]] = []  # (compute reached the read, its load was done), not yet compared

    # ---- the books
    def born(self, saved: SavedTensor) -> None:
        stats, nbytes = self.stats, saved.nbytes
        self.bytes_in[saved.state] += nbytes
        stats.saved += saved.key.ordinal >= 0  # else nobody has saved it yet
        self._live_bytes += nbytes
        if self._live_bytes > stats.most_saved_bytes:
            stats.most_saved_bytes = self._live_bytes
        if self.recorder:
            self.recorder.saved(saved)
        for observer in self.observers:
            observer(saved, None)

    def _move(self, saved: SavedTensor, state: State) -> None:
        old = saved.state
        saved.move(state)
        self.bytes_in[old] -= saved.nbytes
        if state is State.DEAD:
            self._live_bytes -= saved.nbytes
        else:
            self.bytes_in[state] += saved.nbytes
        if state is State.LEAVING:
            self.leaving[saved.serial] = saved
        elif old is State.LEAVING:
            del self.leaving[saved.serial]
        for observer in self.observers:
            observer(saved, old)

    def _wait(self, wait: Wait, stream: Stream, event: Event) -> None:
        if wait not in self._skip_waits:
            self.accelerator.wait(stream, event)

    def _hold_up(self, wait: Wait, stream: Stream, event: Event, saved: SavedTensor) -> None:
        """Compute waits for a copy. How long is recorded: plans are made from times without waits."""
        if self.recorder is None:
            self._wait(wait, stream, event)
            return
        before = self.accelerator.record(stream)
        self._wait(wait, stream, event)
        self.recorder.waited(saved, wait, before, self.accelerator.record(stream))

    def _copy(self, saved: SavedTensor, dst: Bytes, src: Bytes, stream: Stream) -> Event:
        """Queue it. Returns the event behind it."""
        to_host = saved.state is State.DEVICE
        with span("copy to host of" if to_host else "copy to device of", saved.key):
            before = self.accelerator.record(stream) if self.recorder else None
            self.accelerator.copy(dst, src, stream)
            after = self.accelerator.record(stream)
        if self.recorder:
            self.recorder.copied(saved, to_host, before, after)
        return after

    # ---- for recompute
    def drop(self, saved: SavedTensor, again: Call) -> None:
        """DEVICE -> DROPPED: ``again`` makes it once more when it is wanted."""
        saved.again = again
        saved.drop_device()
        self._move(saved, State.DROPPED)

    def give(self, saved: SavedTensor, made: torch.Tensor) -> None:
        """DROPPED -> DEVICE."""
        saved.again = None
        saved.stream = self.accelerator.compute_stream()
        saved.adopt(over(made.untyped_storage(), saved.geometry))
        self._move(saved, State.DEVICE)
        if self.recorder:
            self.recorder.arrived(saved)

    # ---- out
    @_timed
    def offload(self, saved: SavedTensor) -> bool:
        """DEVICE -> LEAVING: queue the copy out. False if it cannot be: the host budget is used up, or the storage's
        owner has resized it since."""
        storage = saved.alias.untyped_storage()
        if storage.nbytes() != saved.nbytes:
            return False
        block = self.pool.alloc(saved.nbytes)
        if block is None:
            self.stats.host_full += 1
            return False
        accelerator = self.accelerator
        try:
            for event in block.pending:
                self._wait(Wait.SLAB_AFTER_COPY, self._d2h, event)
            self._wait(Wait.OFFLOAD_AFTER_COMPUTE, self._d2h, accelerator.record(saved.stream))
            saved.copied = self._copy(saved, block.tensor, storage, self._d2h)
        except BaseException:  # perhaps after the copy was queued
            saved.copied = accelerator.record(self._d2h)
            self.pool.free(block, saved.copied)
            raise
        saved.block = block
        self._move(saved, State.LEAVING)
        return True

    def release(self, saved: SavedTensor, *, planned: bool) -> int:
        """LEAVING -> HOST: give the device memory up. Returns the bytes, 0 if it had to stay."""
        if saved.state is not State.LEAVING or saved.modified:
            return 0  # changed in place since: nothing may ever read it, so there is nothing to keep on the host
        self._hold_up(Wait.RELEASE_AFTER_OFFLOAD, saved.stream, saved.copied, saved)
        saved.drop_device()
        self._move(saved, State.HOST)
        self.gave_up = True
        if self.recorder:
            self.recorder.left(saved)
        self.stats.offloaded_bytes += saved.nbytes
        if planned and saved.held_elsewhere():
            self.stats.ineffective_bytes += saved.nbytes
        return saved.nbytes

    def release_overdue(self, microbatch: int, chunk: int) -> None:
        """Releases of that forward whose position never came: the order was not the plan's."""
        for saved in list(self.leaving.values()):
            if saved.release is not None and saved.release[:3] == (FORWARD, microbatch, chunk):
                self.release(saved, planned=True)

    def stay(self, saved: SavedTensor) -> None:
        """LEAVING -> DEVICE: wanted before it was released. The device copy is the truth, the host copy void."""
        self._free_block(saved, saved.copied)
        self._move(saved, State.DEVICE)

    def evict(self, saved: SavedTensor) -> int:
        """Give device memory up now, from whatever state. Returns the bytes, 0 if that would free nothing."""
        if saved.state is State.RETURNING:  # the host copy is still whole: drop the buffer
            self._hold_up(Wait.FREE_AFTER_COPY, saved.stream, saved.loaded, saved)
            saved.buffer = None
            self._move(saved, State.HOST)
            self.gave_up = True
            if self.recorder:
                self.recorder.left(saved)
            return saved.nbytes
        if saved.state not in (State.DEVICE, State.LEAVING) or saved.modified:
            return 0
        if not is_sole_holder(saved, self._sole_count):
            return 0
        if saved.state is State.DEVICE and not self.offload(saved):
            return 0
        return self.release(saved, planned=False)

    # ---- back
    def load(self, saved: SavedTensor) -> None:
        """HOST -> RETURNING: allocate and queue the copy back. Raises torch.OutOfMemoryError."""
        self._load(saved, saved.new_buffer(self.accelerator))

    @_timed
    def _load(self, saved: SavedTensor, buffer: torch.Tensor) -> None:
        accelerator = self.accelerator
        with self._lock:
            if saved.state is not State.HOST:
                return  # another thread was faster
            assert saved.block is not None
            stream = accelerator.compute_stream()
            self._wait(Wait.LOAD_AFTER_COMPUTE, self._h2d, accelerator.record(stream))
            saved.loaded = self._copy(saved, buffer.untyped_storage(), saved.block.tensor, self._h2d)
            saved.buffer, saved.stream = buffer, stream
            self._move(saved, State.RETURNING)
            self.stats.loaded_bytes += saved.nbytes
            if self.recorder:
                self.recorder.arrived(saved)

    def finish_load(self, saved: SavedTensor, *, prefetched: bool) -> None:
        """RETURNING -> DEVICE: backward reads it. From now on the device copy is the truth."""
        stream, loaded = self.accelerator.compute_stream(), saved.loaded
        if self.recorder is None and self.accelerator.done(loaded):
            loaded = None  # as nearly always where the device waits for the host: marks and waits would cost it more
        else:
            if prefetched:
                self._reads.append((self.accelerator.record(stream), loaded))
            self._hold_up(Wait.USE_AFTER_LOAD, stream, loaded, saved)
        buffer, saved.buffer = saved.buffer, None
        assert buffer is not None
        saved.adopt(buffer)
        self._free_block(saved, loaded)
        saved.copied = None  # compute has waited for it, and for what came after it
        self._move(saved, State.DEVICE)

    def count_late_loads(self) -> None:
        """Compare when reads were reached with when their loads were done, both in device time: the host, which may be
        far ahead, cannot tell. What is still to come is left for the next call."""
        undone = []
        for reached, loaded in self._reads:
            if not (self.accelerator.done(reached) and self.accelerator.done(loaded)):
                undone.append((reached, loaded))
            elif self.accelerator.elapsed_ms(reached, loaded) > LATE_MS:
                self.stats.late_loads += 1
        self._reads = undone

    def _free_block(self, saved: SavedTensor, after: Event | None) -> None:
        block, saved.block = saved.block, None
        assert block is not None
        self.pool.free(block, after)

    # ---- the end
    def bury(self, saved: SavedTensor) -> int:
        """Its last handle is gone. Returns the bytes of device memory that were let go (not: that a copy holds up)."""
        freed = saved.nbytes
        if saved.state is not State.DEVICE or saved.copied is not None:
            freed = self._let_go(saved)
            if saved.block is not None:
                self._free_block(saved, saved.loaded if saved.state is State.RETURNING else saved.copied)
            saved.buffer = None
        saved.again = None  # now, not when the last one of the queue goes: it holds others
        del saved.alias  # and with it the memory, whoever still has the SavedTensor
        if self.recorder:
            self.recorder.died(saved)
        self._move(saved, State.DEAD)
        return freed

    def _let_go(self, saved: SavedTensor) -> int:
        if saved.state in (State.HOST, State.DROPPED):
            return 0
        # In DEVICE too there may be a copy: one out, called off, still reads.
        event = saved.loaded if saved.state is State.RETURNING else saved.copied
        if event is None or self.accelerator.done(event):
            return saved.nbytes
        if Wait.FREE_AFTER_COPY not in self._skip_waits:
            memory = saved.alias.detach() if saved.buffer is None else saved.buffer
            self.lingering.append((event, memory, saved.stream))
        return 0

    def free_lingering(self, *, wait: bool) -> int:
        """Free memory of dead tensors that copies are done with. ``wait``: all of it, at the cost of waiting for those
        that are not. Returns the bytes."""
        freed, kept = 0, []
        for event, memory, stream in self.lingering:
            if wait:
                self._wait(Wait.FREE_AFTER_COPY, stream, event)
            elif not self.accelerator.done(event):
                kept.append((event, memory, stream))
                continue
            freed += memory.untyped_storage().nbytes()
        self.lingering = kept
        return freed

    def close(self) -> None:
        self.accelerator.synchronize()
        with self._lock:
            self.lingering.clear()
