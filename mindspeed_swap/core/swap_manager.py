"""SwapManager: packs what autograd saves, moves it by plan or under pressure, and hands it back bit for bit.

Moves are in mover.py, the waits between them in waits.py; identity, versions and lifetime in saved_tensor.py.

Note: [Nothing is allocated under the lock]
An allocation on the device may run the pressure handler, which takes the lock in whatever thread needs memory. So no
device memory is allocated while the lock is held; a load allocates first and then takes it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Interval, Stream
from mindspeed_swap.core.evicting import Evicting
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.live_tensors import LiveTensors
from mindspeed_swap.core.loose import Loose
from mindspeed_swap.core.module_calls import ModuleCalls
from mindspeed_swap.core.movable import DEFAULT_MIN_BYTES, Movable
from mindspeed_swap.core.mover import Mover
from mindspeed_swap.core.plan import Agenda, Plan
from mindspeed_swap.core.recorder import Recorder
from mindspeed_swap.core.saved_tensor import Dropped, Handle, Passed, SavedTensor, State, modified_in_place
from mindspeed_swap.core.spans import span
from mindspeed_swap.core.step import NAMELESS, Scope, StepStats
from mindspeed_swap.core.step_clock import StepClock
from mindspeed_swap.core.strays import Strays
from mindspeed_swap.core.trace import BACKWARD, ENTER, EXIT, FORWARD, OPTIMIZER, OUTSIDE, Key, Position, StepTrace, new
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
        copy_streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        """``copy_streams``: out and back, if not its own. ``skip_waits``: for tests; each removed must be noticed."""
        self.accelerator, self.pool = accelerator, pool
        self.movable = Movable(accelerator, min_bytes)
        self.on_interval: Callable[[Interval], None] | None = None  # told at every point what led to it
        self.headroom_bytes = 0  # left free by what is fetched ahead
        self.lock = threading.RLock()
        self._mover = Mover(accelerator, pool, self.lock, skip_waits, copy_streams)
        self.bytes_in = self._mover.bytes_in  # of all live saved tensors, by where they are
        self.observers = self._mover.observers  # told after every change: (tensor, old state or None if just saved)
        self.live, self._strays = LiveTensors(), Strays()
        self.scope: Scope | None = None
        self.calls, self.loose, self._agenda = ModuleCalls(self), Loose(self), Agenda()
        self._is_light = self._has_points = self._has_plan = False  # see change_plan; to do, see at points; planned
        self.evicting, self.clock = Evicting(self.lock), StepClock(accelerator)
        self._recording_ms = 0.0  # of the host, in the last recorded step

    @property
    def recorder(self) -> Recorder | None:
        """Of the step that is recorded."""
        return self._mover.recorder

    @property
    def stats(self) -> StepStats:
        """Of the step that runs, or of the last one."""
        return self._mover.stats

    # ---- the step
    def begin_step(self, plan: Plan | None = None, **how: Any) -> None:
        """Start a step under a plan (None: keep everything). ``how``: as of ``change_plan``."""
        self.drain()
        with self.lock:
            self.scope = None
            self.loose.begin_step()
            self.live.by_key.clear()
            self._mover.stats = StepStats()
        self.clock.begin()
        self.change_plan(plan, **how)

    def change_plan(
        self, plan: Plan | None, *, trace: StepTrace | None = None, read_order: Mapping[Key, int] | None = None,
        light: bool = False,
    ) -> None:  # fmt: skip
        """In the middle of a step, for what is saved from now on. ``trace``: to record it into. ``read_order`` (Key ->
        when backward reads it) tells eviction what is needed last. ``light``: what the plan does not want is loose, see
        loose.py, if nobody wants to see it."""
        with self.lock:
            self.loose.take_up()  # before it is recorded, or acted on where they are read
            self._agenda = self._agenda.begun(plan)
            self._strays.begin(read_order)
        self._mover.recorder = Recorder(self.accelerator, trace, self._recording_ms) if trace is not None else None
        observed = trace is not None or self.on_interval is not None
        self._is_light = light and not observed
        self._has_points = observed or bool(self._agenda.swaps)
        self._has_plan = plan is not None and bool(plan.swaps or plan.recomputes)
        self.calls.follow(plan, self._agenda.at_modules, observed)

    def end_step(self) -> tuple[StepStats, StepTrace | None]:
        self.at(Position(OPTIMIZER, 0, 0, OUTSIDE, EXIT))
        recorder, self._mover.recorder = self._mover.recorder, None
        trace = recorder.finish(self.stats.evicted_bytes) if recorder is not None else None
        if recorder is not None:
            self._recording_ms = recorder.host_ms
        self.clock.end(recorder)
        self._mover.count_late_loads()
        return self.stats, trace

    def enter_optimizer(self) -> None:
        self.at(Position(OPTIMIZER, 0, 0, OUTSIDE, ENTER))

    @contextmanager
    def forward(self, microbatch: int, chunk: int = 0) -> Iterator[None]:
        """Everything that autograd saves inside belongs to this microbatch of this model chunk."""
        outer, scope = self.scope, Scope(microbatch, chunk)
        self.scope = scope
        try:
            self.at(scope.border(ENTER))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self.unpack)
            with span("forward of microbatch", microbatch), hooks:
                yield
            self.at(scope.border(EXIT))
            with self.lock:
                self._mover.release_overdue(microbatch, chunk)
            self._begin_interval()
        finally:
            self.scope = outer

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """A transformer layer, by its number from 1. Outside ``forward`` (a recompute in backward) it is nothing."""
        scope = self.scope
        if scope is None:
            yield
            return
        outer, scope.layer = scope.layer, number
        try:
            self.at(scope.border(ENTER))
            with span("forward of layer", number):
                yield
            self.at(scope.border(EXIT))
        finally:
            scope.layer = number if scope.stays else outer

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """A part that saves its inputs only after it has run (reentrant checkpoint). Around layers, what it saves
        belongs to the last of them."""
        scope = self.scope
        if scope is None or scope.layer != OUTSIDE:
            yield
            return
        scope.stays = True
        try:
            yield
        finally:
            scope.stays, scope.layer = False, OUTSIDE

    # ---- the hooks
    def _pack(self, tensor: torch.Tensor) -> Handle | Passed:
        scope = self.scope
        if scope is None:
            return Passed(tensor)
        number = self.calls.next_save()
        self._mover.stats.saves += 1
        key: Key = new(Key, (scope.microbatch, scope.chunk, scope.layer, scope.next_ordinal()))
        if self._is_light and key not in self._agenda.saves and (passed := self.loose.pack(tensor, key, number)):
            return passed
        storage, anchor = self.movable.storage_of(tensor), key if key in self._agenda.anchors else None
        if storage is None:
            if anchor is not None:  # an expert had no tokens: what is planned here is done anyway
                self.act(new(Position, (FORWARD, *key)))
            return Passed(tensor, anchor)
        position: Position | None = new(Position, (FORWARD, *key)) if self._has_points else None
        self._close(position)
        handle = self.loose.join(tensor, storage, key, anchor) or self._keep(tensor, storage, key, number)
        self.act(position)
        return handle

    def hold(self, tensor: torch.Tensor) -> Handle | Passed:
        """As if it were saved, for a call that will run again. Its name comes when somebody saves it."""
        assert self.scope is not None
        storage = self.movable.storage_of(tensor)
        if storage is None:
            return Passed(tensor)
        key = self.scope.nameless_key()
        return self.loose.join(tensor, storage, key) or self._keep(tensor, storage, key, None)

    def _keep(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, number: int | None) -> Handle:
        """``number``: of this save within the call that will run again."""
        with self.lock:
            saved = self.live.find(tensor, storage)
            known = saved is not None
            if saved is None:
                saved = self.enter(tensor, storage, key, self.accelerator.compute_stream())
            elif saved.key.ordinal <= NAMELESS < key.ordinal:
                self._name(saved, key)
            elif self._mover.recorder:
                self._mover.recorder.used(saved)
            saved.handles += 1
            handle = Handle(saved, tensor, key, self.live.dead, whole=not known)
            # What has no name yet is kept by whoever holds it, as it is in a recorded step.
            if not known and self._has_plan and key.ordinal > NAMELESS:
                self._follow_plan(saved, number)
        return handle

    def enter(self, *what: Any) -> SavedTensor:
        """Into the books. ``what``: as of ``LiveTensors.add``."""
        self._mover.born(saved := self.live.add(*what))
        return saved

    def _name(self, saved: SavedTensor, key: Key) -> None:
        """An argument of a call that will run again is saved for the first time."""
        self._strays.rename(saved, key)
        self.live.rename(saved, key)
        self.stats.saved += 1
        if self._mover.recorder:
            self._mover.recorder.saved(saved)
        if saved.state is State.DEVICE:
            self._follow_plan(saved, None)

    def _follow_plan(self, saved: SavedTensor, number: int | None) -> None:
        if (call := self.calls.makes(saved, number)) is not None:
            self._mover.drop(saved, call)
        elif (swap := self._agenda.swaps.get(saved.key)) is not None:
            # Whatever its size is in this step: what an expert saves varies with its tokens.
            saved.release = swap.release
            self._mover.offload(saved)

    def unpack(self, packed: Handle | Passed) -> torch.Tensor:
        if self.scope is not None and (recorder := self._mover.recorder) is not None:
            recorder.modules.backward_runs()
        if isinstance(packed, Passed):
            return self.loose.unpack(packed)
        first, packed.read = not packed.read, True
        position: Position | None = new(Position, (BACKWARD, *packed.key)) if first and self._has_points else None
        self._close(position)
        view = self._read(packed, first)
        self.act(position)  # what is released here makes room for a module that runs again now
        if view is None:
            view = self.fetch(packed, first)
        if first:
            self.look_ahead(packed.key)
        return view

    def fetch(self, packed: Handle | Passed, first: bool = False) -> torch.Tensor:
        if isinstance(packed, Passed):
            return self.loose.unpack(packed)
        prefetched = True
        while (view := self._read(packed, first, prefetched=prefetched)) is None:
            if (call := packed.saved.again) is not None:
                self.calls.run_again(call, packed.saved)
            elif packed.saved.state is State.HOST:
                prefetched = False
                self.stats.on_demand_loads += 1
                self._mover.load(packed.saved)
        return view

    def give(self, saved: SavedTensor | Dropped, made: torch.Tensor) -> None:
        """What a module made again."""
        with self.lock:
            if isinstance(saved, Dropped):
                self.loose.give(saved, made)
            elif saved.state is State.DROPPED:
                self.live.storage_goes(saved)
                self._mover.give(saved, made)
                self.live.storage_came(saved)

    def _read(self, packed: Handle, first: bool, *, prefetched: bool = True) -> torch.Tensor | None:
        """None: it must be loaded; perhaps once more, if another thread's pressure pushes it out before this."""
        saved, mover = packed.saved, self._mover
        with self.lock:
            if saved.modified:
                shape = saved.geometry[1] if packed.whole else packed.shape
                raise modified_in_place(saved.alias, shape, saved.version)
            if saved.state in (State.HOST, State.DROPPED):
                return None
            if saved.state is State.LEAVING:
                mover.stay(saved)
            elif saved.state is State.RETURNING:
                self.live.storage_goes(saved)
                mover.finish_load(saved, prefetched=prefetched)
                self.live.storage_came(saved)
            if first and mover.recorder:
                mover.recorder.read(saved)
            return saved.view(packed)

    # ---- points
    def reach(self, position: Position) -> None:
        """``at``, where something is planned there."""
        if position in self._agenda.releases or position in self._agenda.prefetches:
            self.at(position)

    def at(self, position: Position) -> None:
        self._close(position)
        self.act(position)

    def _close(self, position: Position | None) -> None:
        """The interval that led here is over. (None: there is nothing to do, or to see, at the points of this step.)"""
        self.tidy()
        recorder = self._mover.recorder
        if position is not None and (recorder or self.on_interval):
            interval = (recorder or self.accelerator).take_interval()
            self._mover.gave_up = False
            if recorder:
                with self.lock:  # it looks at use counts of storages that another thread could give up meanwhile
                    recorder.point(position, interval)
            if self.on_interval:
                self.on_interval(interval)

    def act(self, position: Position | None) -> None:
        """What the plan wants at this position (None: nothing). Each entry is used once."""
        if position is None:
            return
        for key in self._agenda.releases.pop(position, ()):
            if (saved := self.live.by_key.get(key)) is not None:
                with self.lock:
                    self._mover.release(saved, planned=True)
                    if self._is_light and saved.state is State.HOST and saved.held_elsewhere():
                        self.loose.take_up()  # it was saved under another name before
        if self._mover.gave_up:
            self._begin_interval()
        for key in self._agenda.prefetches.pop(position, ()):
            if (saved := self.live.by_key.get(key)) is not None and saved.state is State.HOST:
                self._prefetch(saved)

    def _begin_interval(self) -> None:
        """An interval begins after its point has given memory up: what was there before is not part of its peak."""
        recorder = self._mover.recorder
        if self._mover.gave_up and (recorder or self.on_interval):
            (recorder or self.accelerator).take_interval()
        self._mover.gave_up = False

    def _prefetch(self, saved: SavedTensor) -> None:
        if self.accelerator.compute_stream() == saved.stream:  # else memory of this stream would be read on that one
            # A prefetch that would push others out is worse than a late load.
            with self.evicting.off(), suppress(torch.OutOfMemoryError):
                self._mover.load(saved)
                return
        self.stats.skipped_prefetches += 1
        self._strays.add(saved)

    def look_ahead(self, key: Key) -> None:
        """Fetch what was pushed out and is wanted soon, as far as there is room. Needs the order of a recorded step."""
        for saved in self._strays.wanted_after(key) if self._strays else ():
            if self.accelerator.memory().left_bytes < saved.nbytes + self.headroom_bytes:
                return
            self._strays.remove(saved)
            if saved.state is State.HOST:
                self._prefetch(saved)

    # ---- the end of a saved tensor
    def tidy(self) -> None:
        if self.live.dead or self._mover.lingering:
            self.drain()

    def drain(self) -> int:
        """Act on the handles that died since the last event. Returns the bytes of device memory that this freed."""
        with self.lock:
            freed = sum(self._mover.bury(saved) for saved in self.live.ended())
            if self._mover.lingering:
                freed += self._mover.free_lingering(wait=False)
        return freed

    # ---- pressure
    def evict(self, nbytes: int) -> int:
        """Push kept tensors out until ``nbytes`` were freed or none is left: what backward needs last first (before an
        order is known, what was saved first), if our reference is the last. Returns the bytes given up."""
        if self.evicting.inside:
            return 0
        freed = self.drain()
        if not self.evicting.allowed:
            return freed
        with self.lock:
            if freed < nbytes:
                freed += self._mover.free_lingering(wait=True)
            if freed >= nbytes:
                return freed
            freed += self.loose.take_up()
            for saved in self._strays.last_read_first(self.live.by_serial.values()):
                if freed >= nbytes:
                    break
                if given_up := self._mover.evict(saved):
                    freed += given_up
                    self._strays.add(saved)
                    self.stats.evictions += 1
                    self.stats.evicted_bytes += given_up
        return freed

    def close(self) -> None:
        """Let go of everything. Saved tensors still in a graph can no longer be read back after this."""
        self.drain()
        self._mover.close()
        self._agenda = Agenda()
