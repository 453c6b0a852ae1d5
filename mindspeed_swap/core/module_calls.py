"""Module calls as the manager sees them: recorded, recomputed where the plan says so, and run again (again.py)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_swap.core.again import Call, OnModule, Produced, RandomState, Replay, may_stop, tensors
from mindspeed_swap.core.frame_room import with_room
from mindspeed_swap.core.module_state import ModuleState, keepers_in
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.saved_tensor import Dropped, SavedTensor, State, can_be_emptied, counter_of
from mindspeed_swap.core.spans import span
from mindspeed_swap.core.trace import POINTWISE, ModuleKey, plain_name, pointwise_of

if TYPE_CHECKING:
    from mindspeed_swap.core.swap_manager import SwapManager

INSIDE = -1


class ModuleCalls:
    """A part of the manager."""

    def __init__(self, manager: SwapManager) -> None:
        self.random = RandomState()  # a framework with generators of its own puts a subclass here
        self._planned: set[ModuleKey] = set()  # to be recomputed
        self._names: set[str] = set()  # of these modules
        self._has_borders = self._observed = False  # something is to be done where modules begin and end; to be seen
        self._manager = manager
        self._call: Call | None = None  # of those, the one whose forward runs
        self._around: Call | None = None  # one in which a module runs that will not run again with it
        self._produced = Produced()
        # Told of module calls while one runs again; asked for what it has kept.
        self._on_module: OnModule | None = None
        self._replay: Replay | None = None
        self._runs_again = 0  # how many are running, one inside the other

    def follow(self, plan: Plan | None, borders: bool, observed: bool) -> None:
        """The manager has something to do where modules begin and end; or all is to be seen."""
        self._planned = {recompute.key for recompute in plan.recomputes} if plan else set()
        names = {plain_name(key) for key in self._planned}
        self._names = names | {name.removesuffix(POINTWISE) for name in names}
        self._has_borders, self._observed = borders or observed, observed
        self._produced.clear()  # a call that gives what it did not make would be kept as long as that

    def call(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        *, keeps_outputs: bool = False, once: bool = False,
    ) -> Any:  # fmt: skip
        """``function(*args, **kwargs)``, as the call of a module of that name: it is recorded, and recomputed if the
        plan says so. Outside ``forward`` it is nothing more.

        Recomputed, it also frees what others save of its outputs, if not ``keeps_outputs``: then the next call of its
        kind can be run from them. ``once``: it must not run again; where a call around it does, it is left out.
        """
        scope = self._manager.scope
        if scope is None:
            if self._on_module is None:
                return function(*args, **kwargs)
            if (answer := self._on_module((args, kwargs), once)) is not None:
                return answer[0]
            with may_stop(args):
                return function(*args, **kwargs)
        if not self._observed and self._call is None and self._around is None and name not in self._names:
            if not self._has_borders:
                return function(*args, **kwargs)
            self._manager.reach(scope.module_border())
            result = function(*args, **kwargs)
            self._manager.reach(scope.module_border())
            return result
        key = scope.next_call(name)
        if self._has_borders:
            self._manager.at(scope.module_border())
        tracked, versions, refuses = None, [], self._manager.movable.refuses
        if (recorder := self._manager.recorder) is not None:
            start = perf_counter()
            versions = [(tensor, tensor._version) for tensor in tensors((args, kwargs))]
            inputs = [tensor for tensor, _ in versions if not refuses(tensor)]
            known = [(tensor, self._manager.live.find(tensor)) for tensor in inputs]
            state = ModuleState(keepers_in(function, (args, kwargs)))
            tracked = recorder.enter(key, known, state, once)
            recorder.took_since(start)
        try:
            result = self._run_within(self._call, key, function, args, kwargs, keeps_outputs, once)
        except BaseException:
            if recorder is not None and tracked is not None:
                recorder.modules.drop(tracked)
            raise
        if self._has_borders:
            self._manager.at(scope.module_border())
        if recorder is not None and tracked is not None and recorder is self._manager.recorder:
            start = perf_counter()
            unchanged = all(tensor._version == version for tensor, version in versions)
            gave = tensors(result)
            made = [] if keeps_outputs else [(x, self._manager.live.find(x)) for x in gave if not refuses(x)]
            tracked.given_at = [(counter_of(tensor), version) for tensor, version in versions if can_be_emptied(tensor)]
            recorder.exit(tracked, made, unchanged=unchanged, gave=gave)
            recorder.took_since(start)
        return result

    def kept(self, function: Callable[[], Any]) -> Any:
        """``function()``: small, on the host, the same each time, and slow to come by, as a number that the device is
        asked for. A call that runs again does not ask again. It must not raise."""
        if self._replay is not None:
            return self._replay()
        result = function()
        if self._call is not None:
            self._call.kept.append(result)
        return result

    def _run_within(
        self, outer: Call | None, key: ModuleKey, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any], keeps_outputs: bool, once: bool,
    ) -> Any:  # fmt: skip
        """The function, within the call that will run again (if one does)."""
        if outer is None:
            return self._run(key, function, args, kwargs, keeps_outputs, once)
        if not (outer.pointwise or once):
            with outer.module((args, kwargs)):
                return function(*args, **kwargs)
        around, self._call, self._around = self._around, None, outer
        try:
            with outer.module((args, kwargs)) as number:
                result = self._run(key, function, args, kwargs, keeps_outputs, once)
        finally:
            self._call, self._around = outer, around
        for tensor in tensors(result):
            # What it was given and gives back would be wanted from the very call that keeps it: a circle.
            if (saved := self._manager.live.find(tensor)) is not None and saved.again is outer:
                self._manager.give(saved, tensor)
            self._manager.loose.give_back(tensor, outer)
        outer.returned(number, result)
        return result

    def _run(
        self, key: ModuleKey, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        keeps_outputs: bool, once: bool,
    ) -> Any:  # fmt: skip
        """The function; so that it can run again, or its pointwise part can, where that is planned."""
        if once or not self._planned:
            return function(*args, **kwargs)
        pointwise = pointwise_of(key)
        part = pointwise in self._planned
        if not (part or key in self._planned):
            return function(*args, **kwargs)
        arguments = (args, kwargs)
        call = Call(pointwise if part else key, function, arguments, self._manager.hold, self.random, part)
        self._call = call
        try:
            result = function(*args, **kwargs)
        finally:
            self._call = None
        if keeps_outputs or part:
            call.forward_is_over()  # else who saves an output may want all of it
        else:
            gave, refuses = tensors(result), self._manager.movable.refuses
            self._produced.add(call, gave, [*tensors(arguments), *filter(refuses, gave)])
        return result

    def run_again(self, call: Call, wanted: SavedTensor | Dropped) -> None:
        manager, accelerator = self._manager, self._manager.accelerator
        with call.lock:
            if wanted.state is not State.DROPPED:
                return  # another thread was faster
            outer, manager.scope = manager.scope, None  # layers and modules inside are not new ones
            self._runs_again += 1
            recorder, outermost = manager.recorder, self._runs_again == 1
            if recorder:
                earlier = accelerator.take_interval() if outermost else None
                begin = recorder.here(accelerator.record(accelerator.compute_stream()))
            try:
                with span("recompute of", call.key):
                    with_room(call.run, manager.fetch, manager.live.dropped, manager.give, self._watching)
            finally:
                self._runs_again -= 1
                manager.scope = outer
            manager.stats.recomputed_calls += 1
            if recorder:
                end = recorder.here(accelerator.record(accelerator.compute_stream()))
                recorder.ran_again(call.key, begin, end)
                if earlier is not None:
                    recorder.recomputed(call.key, earlier, accelerator.take_interval())

    @contextmanager
    def _watching(self, enter: OnModule, replay: Replay) -> Iterator[None]:
        outer = self._on_module, self._replay
        self._on_module, self._replay = enter, replay
        try:
            yield
        finally:
            self._on_module, self._replay = outer

    # ---- for the hooks of the manager
    @property
    def running(self) -> Call | None:
        """The call whose forward runs, if it will run again with all that runs now."""
        return self._call

    def gave(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """It is an output of a call that can make it again. ``storage``: of the tensor."""
        return (storage._cdata, tensor._version) in self._produced

    def next_save(self) -> int | None:
        """Number of a save within the call that will run again; None outside. In a module inside that will not run with
        it only what it was given counts."""
        if self._call is not None:
            return self._call.next_save()
        return None if self._around is None else INSIDE

    def makes(self, saved: SavedTensor, number: int | None) -> Call | None:
        """The call that can make it again, so that it need not be kept. ``number``: of this save within a call."""
        if number is not None and self._call is not None:
            self._call.drops(saved.serial, saved.identity, number)
            return self._call
        if number == INSIDE and self._around is not None and self._around.drops_input(saved.serial, saved.identity):
            return self._around
        made = self._produced.find(saved)
        if made is None:
            return None
        call, index = made
        call.drops_output(saved.serial, index)
        return call
