"""SwapManager: packs what autograd saves, moves it by plan or under pressure, and hands it back bit for bit.

The order of streams is the list in waits.py. Identity, versions and lifetime are explained in saved_tensor.py.

Note: [Nothing is allocated under the lock]
An allocation on the device may run the pressure handler, which takes the lock in whatever thread needs memory. So no
device memory is allocated while the lock is held; a load allocates first and then takes it.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event, Interval, Stream
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.movable import DEFAULT_MIN_BYTES, Movable
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.recorder import Recorder, is_sole_holder, sole_holder_count
from mindspeed_swap.core.saved_tensor import (
    Handle,
    Passed,
    SavedTensor,
    State,
    flat_bytes,
    modified_in_place,
)
from mindspeed_swap.core.step import Scope, StepStats
from mindspeed_swap.core.trace import (
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    Key,
    Position,
    StepTrace,
)
from mindspeed_swap.core.waits import Wait


class SwapManager:
    """One per process and device. Called from the thread that runs the step and from autograd's threads."""

    def __init__(
        self,
        accelerator: Accelerator,
        pool: HostPool,
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        skip_waits: frozenset[Wait] = frozenset(),
    ) -> None:
        self.accelerator = accelerator
        self.pool = pool
        self.movable = Movable(accelerator, min_bytes)
        self.stats = StepStats()
        self.bytes_in: dict[State, int] = dict.fromkeys(State, 0)  # of all live saved tensors, by where they are
        self.observers: list[Callable[[SavedTensor, State], None]] = []  # told after every change: (tensor, old state)
        self.on_interval: Callable[[Interval], None] | None = None  # told at every point what led to it
        self._skip_waits = skip_waits  # for tests: each wait removed must be noticed
        self._d2h, self._h2d = accelerator.new_stream(), accelerator.new_stream()
        self._lock = threading.RLock()
        self._dead: deque[SavedTensor] = deque()
        self._live: dict[int, SavedTensor] = {}  # by serial: in order of saving
        self._leaving: dict[int, SavedTensor] = {}
        self._by_storage: dict[tuple[int, int], SavedTensor] = {}
        self._by_key: dict[Key, SavedTensor] = {}  # of this step
        self._lingering: list[tuple[Event, torch.Tensor]] = []  # memory of dead tensors that a copy still uses
        self._serial = 0
        self._sole_count = sole_holder_count()
        self._scope: Scope | None = None
        self._swaps: dict[Key, Swap] = {}
        self._releases: dict[Position, list[Key]] = {}
        self._prefetches: dict[Position, list[Key]] = {}
        self._read_order: Mapping[Key, int] = {}
        self._recorder: Recorder | None = None
        self._thread = threading.local()

    # ---- the step
    def begin_step(
        self, plan: Plan | None = None, *, trace: StepTrace | None = None, read_order: Mapping[Key, int] | None = None
    ) -> None:
        """Start a step under a plan (None: keep everything). With ``trace`` the step is recorded into it.

        ``read_order`` (Key -> when backward reads it) tells eviction what is needed last.
        """
        self._drain()
        with self._lock:
            self._scope = None
            self._by_key.clear()
            self.stats = StepStats()
            self._swaps = {swap.key: swap for swap in plan.swaps} if plan else {}
            self._releases, self._prefetches = {}, {}
            for swap in self._swaps.values():
                self._releases.setdefault(swap.release, []).append(swap.key)
                self._prefetches.setdefault(swap.prefetch, []).append(swap.key)
            self._read_order = read_order or {}
        self._recorder = Recorder(self.accelerator, trace) if trace is not None else None

    def end_step(self) -> tuple[StepStats, StepTrace | None]:
        self._at(Position(OPTIMIZER, 0, 0, OUTSIDE, EXIT))
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return self.stats, None
        recorder.trace.evicted_bytes = self.stats.evicted_bytes
        return self.stats, recorder.finish()

    def enter_optimizer(self) -> None:
        self._at(Position(OPTIMIZER, 0, 0, OUTSIDE, ENTER))

    @contextmanager
    def forward(self, microbatch: int, chunk: int = 0) -> Iterator[None]:
        """Everything that autograd saves inside belongs to this microbatch of this model chunk."""
        outer, scope = self._scope, Scope(microbatch, chunk)
        self._scope = scope
        try:
            self._at(scope.border(ENTER))
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._at(scope.border(EXIT))
            self._release_overdue(scope)
        finally:
            self._scope = outer

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """A transformer layer, by its number from 1. Outside ``forward`` (a recompute in backward) it is nothing."""
        scope = self._scope
        if scope is None:
            yield
            return
        outer, scope.layer = scope.layer, number
        try:
            self._at(scope.border(ENTER))
            yield
            self._at(scope.border(EXIT))
        finally:
            scope.layer = outer

    # ---- the hooks
    def _pack(self, tensor: torch.Tensor) -> Handle | Passed:
        scope = self._scope
        if scope is None:
            return Passed(tensor)
        key = scope.next_key()
        if self.movable.refuses(tensor):
            return Passed(tensor)
        position = Position(FORWARD, *key)
        self._close(position)
        storage = tensor.untyped_storage()
        with self._lock:
            saved = self._by_storage.get((storage._cdata, tensor._version))
            if saved is not None and saved.is_of(storage) and not saved.modified:
                if self._recorder:
                    self._recorder.used(saved)
            else:
                saved = self._save(tensor, storage, key)
            saved.handles += 1
            handle = Handle(saved, tensor, key, self._dead)
        self._act(position)
        return handle

    def _save(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key) -> SavedTensor:
        self._serial += 1
        saved = SavedTensor(tensor, storage, key, self._serial)
        swap = self._swaps.get(key)
        self._live[saved.serial] = self._by_key[key] = self._by_storage[saved.identity] = saved
        self.bytes_in[State.DEVICE] += saved.nbytes
        self.stats.saved += 1
        if self._recorder:
            self._recorder.saved(saved)
        if swap is not None and swap.nbytes == saved.nbytes:  # else the plan was made for another shape: keep it
            saved.release = swap.release
            self._offload(saved)
        return saved

    def _unpack(self, packed: Handle | Passed) -> torch.Tensor:
        if isinstance(packed, Passed):
            return packed.get()
        saved = packed.saved
        position = Position(BACKWARD, *packed.key)
        first = not packed.read
        if first:
            packed.read = True
            self._close(position)
        if saved.state is State.RETURNING and not self.accelerator.done(saved.loaded):
            self.stats.late_loads += 1
        elif saved.state is State.HOST:
            self.stats.on_demand_loads += 1
            self._load(saved)
        with self._lock:
            if saved.state is State.LEAVING:
                self._stay(saved)
            elif saved.state is State.RETURNING:
                self._finish_load(saved)
            if saved.modified:
                raise modified_in_place(saved.dtype, packed.shape, saved.alias._version, saved.version)
            view = saved.view(packed)
            if first and self._recorder:
                self._recorder.read(saved)
        if first:
            self._act(position)
        return view

    # ---- points
    def _at(self, position: Position) -> None:
        self._close(position)
        self._act(position)

    def _close(self, position: Position) -> None:
        """The interval that led here is over."""
        self._drain()
        if self._recorder or self.on_interval:
            interval = self.accelerator.take_interval()
            if self._recorder:
                self._recorder.point(position, interval)
            if self.on_interval:
                self.on_interval(interval)

    def _act(self, position: Position) -> None:
        """What the plan wants at this position. Each entry is used once."""
        for key in self._releases.pop(position, ()):
            saved = self._by_key.get(key)
            if saved is not None:
                with self._lock:
                    self._release(saved, planned=True)
        for key in self._prefetches.pop(position, ()):
            saved = self._by_key.get(key)
            if saved is not None and saved.state is State.HOST:
                self._thread.may_not_evict = True  # a prefetch that would push others out is worse than a late load
                try:
                    self._load(saved)
                except torch.OutOfMemoryError:
                    self.stats.skipped_prefetches += 1
                finally:
                    self._thread.may_not_evict = False

    def _release_overdue(self, scope: Scope) -> None:
        """Releases of this microbatch's forward whose position never came: the order was not the plan's."""
        with self._lock:
            for saved in list(self._leaving.values()):
                due = saved.release
                if due is not None and due[:3] == (FORWARD, scope.microbatch, scope.chunk):
                    self._release(saved, planned=True)

    # ---- moves. All but ``_load`` are called with the lock held.
    def _wait(self, wait: Wait, stream: Stream, event: Event) -> None:
        if wait not in self._skip_waits:
            self.accelerator.wait(stream, event)

    def _move(self, saved: SavedTensor, state: State) -> None:
        old = saved.state
        saved.move(state)
        self.bytes_in[old] -= saved.nbytes
        if state is not State.DEAD:
            self.bytes_in[state] += saved.nbytes
        if state is State.LEAVING:
            self._leaving[saved.serial] = saved
        elif old is State.LEAVING:
            del self._leaving[saved.serial]
        for observer in self.observers:
            observer(saved, old)

    def _offload(self, saved: SavedTensor) -> bool:
        """DEVICE -> LEAVING: queue the copy out. False if the host budget is used up."""
        block = self.pool.alloc(saved.nbytes)
        if block is None:
            self.stats.host_full += 1
            return False
        for event in block.pending:
            self._wait(Wait.SLAB_AFTER_COPY, self._d2h, event)
        accelerator = self.accelerator
        self._wait(Wait.OFFLOAD_AFTER_COMPUTE, self._d2h, accelerator.record(accelerator.compute_stream()))
        accelerator.copy(block.tensor, flat_bytes(saved.alias.untyped_storage()), self._d2h)
        saved.block, saved.copied = block, accelerator.record(self._d2h)
        self._move(saved, State.LEAVING)
        return True

    def _release(self, saved: SavedTensor, *, planned: bool) -> int:
        """LEAVING -> HOST: give the device memory up. Returns the bytes, 0 if it had to stay."""
        if saved.state is not State.LEAVING or saved.modified:
            return 0  # changed in place since: reading it must raise, so nothing may hide the change
        self._wait(Wait.RELEASE_AFTER_OFFLOAD, self.accelerator.compute_stream(), saved.copied)
        saved.drop_device()
        self._move(saved, State.HOST)
        if self._recorder:
            self._recorder.left(saved)
        self.stats.offloaded_bytes += saved.nbytes
        if planned and saved.held_elsewhere():
            self.stats.ineffective_bytes += saved.nbytes
        return saved.nbytes

    def _stay(self, saved: SavedTensor) -> None:
        """LEAVING -> DEVICE: wanted before it was released. The device copy is the truth, the host copy void."""
        self._free_block(saved, saved.copied)
        self._move(saved, State.DEVICE)

    def _load(self, saved: SavedTensor) -> None:
        """HOST -> RETURNING: allocate and queue the copy back. Raises torch.OutOfMemoryError."""
        accelerator = self.accelerator
        buffer = accelerator.empty(saved.nbytes)
        with self._lock:
            if saved.state is not State.HOST:
                return
            assert saved.block is not None
            self._wait(Wait.LOAD_AFTER_COMPUTE, self._h2d, accelerator.record(accelerator.compute_stream()))
            accelerator.copy(buffer, saved.block.tensor, self._h2d)
            saved.buffer, saved.loaded = buffer, accelerator.record(self._h2d)
            self._move(saved, State.RETURNING)
            self.stats.loaded_bytes += saved.nbytes
            if self._recorder:
                self._recorder.arrived(saved)

    def _finish_load(self, saved: SavedTensor) -> None:
        """RETURNING -> DEVICE: backward reads it. From now on the device copy is the truth."""
        self._wait(Wait.USE_AFTER_LOAD, self.accelerator.compute_stream(), saved.loaded)
        buffer, saved.buffer = saved.buffer, None
        assert buffer is not None
        self._forget_storage(saved)
        saved.adopt(buffer)
        self._by_storage[saved.identity] = saved
        self._free_block(saved, saved.loaded)
        self._move(saved, State.DEVICE)

    def _free_block(self, saved: SavedTensor, after: Event) -> None:
        block, saved.block = saved.block, None
        assert block is not None
        self.pool.free(block, after)

    def _forget_storage(self, saved: SavedTensor) -> None:
        if self._by_storage.get(saved.identity) is saved:
            del self._by_storage[saved.identity]

    # ---- the end of a saved tensor
    def _drain(self) -> None:
        """Act on the handles that died since the last event."""
        while self._dead:
            saved = self._dead.popleft()
            with self._lock:
                saved.handles -= 1
                if saved.handles == 0:
                    self._bury(saved)
        if self._lingering:
            with self._lock:
                self._lingering = [held for held in self._lingering if not self.accelerator.done(held[0])]

    def _bury(self, saved: SavedTensor) -> None:
        if saved.state is State.LEAVING:
            self._linger(saved.copied, saved.alias.detach())
        elif saved.state is State.RETURNING:
            assert saved.buffer is not None
            self._linger(saved.loaded, saved.buffer)
        if saved.block is not None:
            self._free_block(saved, saved.loaded if saved.state is State.RETURNING else saved.copied)
        self._forget_storage(saved)
        saved.buffer = None
        saved.drop_device()
        if self._recorder:
            self._recorder.died(saved)
        del self._live[saved.serial]
        if self._by_key.get(saved.key) is saved:
            del self._by_key[saved.key]
        self._move(saved, State.DEAD)

    def _linger(self, event: Event, memory: torch.Tensor) -> None:
        if Wait.FREE_AFTER_COPY not in self._skip_waits:
            self._lingering.append((event, memory))

    # ---- pressure
    def evict(self, nbytes: int) -> int:
        """Push kept tensors out until ``nbytes`` were freed or none is left. Returns the bytes given up.

        What backward needs last goes first; before an order is known, what was saved first. Only storages whose last
        reference is ours: others would free nothing.
        """
        if getattr(self._thread, "may_not_evict", False):
            return 0
        self._drain()
        freed = 0
        with self._lock:
            compute = self.accelerator.compute_stream()
            for event, memory in self._lingering:
                self.accelerator.wait(compute, event)
                freed += memory.untyped_storage().nbytes()
            self._lingering.clear()
            if freed >= nbytes:
                return freed
            order = self._read_order
            for saved in sorted(self._live.values(), key=lambda s: (-order.get(s.key, 0), s.serial)):
                given_up = self._give_up(saved)
                if given_up:
                    freed += given_up
                    self.stats.evictions += 1
                    self.stats.evicted_bytes += given_up
                if freed >= nbytes:
                    break
        return freed

    def _give_up(self, saved: SavedTensor) -> int:
        if saved.state is State.RETURNING:  # the host copy is still whole: drop the buffer
            self._wait(Wait.FREE_AFTER_COPY, self.accelerator.compute_stream(), saved.loaded)
            saved.buffer = None
            self._move(saved, State.HOST)
            if self._recorder:
                self._recorder.left(saved)
            return saved.nbytes
        if saved.state not in (State.DEVICE, State.LEAVING) or saved.modified:
            return 0
        if not is_sole_holder(saved, self._sole_count):
            return 0
        if saved.state is State.DEVICE and not self._offload(saved):
            return 0
        return self._release(saved, planned=False)

    def close(self) -> None:
        """Let go of everything. Saved tensors still in a graph can no longer be read back after this."""
        self._drain()
        self.accelerator.synchronize()
        with self._lock:
            self._lingering.clear()
            self._swaps, self._releases, self._prefetches = {}, {}, {}
