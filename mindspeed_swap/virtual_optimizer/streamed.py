"""The optimizer's own step, slice by slice, with the state passing through device buffers.

While one slice is stepped the next is copied in and the last one out. To the optimizer it is its own ``step`` with
fewer parameters: the group's list is replaced meanwhile, the group's step count put back in between, and hooks fire
once around all of it.

Note: [Who looks into the state]
Between steps slices may be on their way (overlap.py). ``optimizer.state`` tells when it is looked into, and so does
``to_host``; before that all of them come to rest. What does not tell is a kernel that reads a tensor of the state which
somebody has kept from before the step.
"""
from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer.arena import Arena
from mindspeed_swap.virtual_optimizer.pipeline import Pipeline, Streams
from mindspeed_swap.virtual_optimizer.slices import Piece, Slice, cut
from mindspeed_swap.virtual_optimizer.state import MASTER, shaped_like
from mindspeed_swap.virtual_optimizer.waits import Wait

# Copies of 16 MiB and more run at the link's full rate, and a slice has at least one for each of two moments.
SLICE_BYTES = 32 * MIB
# Buffers must stay small beside what has left the device for them, also in a small model; but each slice is a call of
# the optimizer, which takes the host a third of a millisecond.
SLICE_SHARE = 16
SMALLEST_SLICE_BYTES = 64 << 10

Optimizer = torch.optim.Optimizer


class Streamed:
    """Replaces ``step`` of the arena's optimizer."""

    def __init__(
        self,
        arena: Arena,
        accelerator: Accelerator,
        streams: Streams,
        slice_bytes: int | None = None,
        skip_waits: frozenset[Wait] = frozenset(),
    ) -> None:
        self._arena = arena
        self._optimizer = arena.optimizer
        limit = max(SMALLEST_SLICE_BYTES, min(SLICE_BYTES, arena.nbytes // SLICE_SHARE))
        self._limit = slice_bytes or limit
        self._order: list[list[int]] = []
        self._slices: list[list[Slice]] = []  # by group
        self.pipeline = Pipeline(arena.host_bytes, accelerator, streams, skip_waits)
        self._follow_groups()
        # Main parameters are read right after the step, to make the model's; and anybody may write to them before it.
        self._all_leave = any(unit.key == MASTER for unit in arena.units)
        self.pipeline.comes_ahead = not self._all_leave
        self.may_keep: Callable[[], int] = lambda: 0  # asked when the step is over: bytes of buffers
        self.later_bytes: Callable[[], int] = lambda: 0  # asked before it: of buffers that may leave after it
        self.came_to_rest: Callable[[], None] = lambda: None  # told when somebody looks while something is on its way
        self._in_step = False
        arena.before_use = self._come_to_rest
        self._watch_state()
        self._own_step = _without_hooks(type(self._optimizer).step)
        # On the instance and as a bound method, as torch's schedulers do it.
        self._optimizer.step = types.MethodType(self._with_hooks(), self._optimizer)  # type: ignore[method-assign]

    def _follow_groups(self) -> None:
        """The slices are in the order of the groups' parameters, as far as their state moves. Others may change it."""
        groups = self._optimizer.param_groups
        order = [[id(p) for p in group["params"] if self._arena.units_of(p)] for group in groups]
        if order != self._order:
            self._order, self._slices = order, cut(self._arena, self._limit)
            self.pipeline.take([each for slices in self._slices for each in slices])

    def _looked_into(self) -> None:
        if not self._in_step:
            self._come_to_rest()

    def _come_to_rest(self) -> None:
        self._watch_state()  # a load may have put another in its place
        if self.pipeline.held_bytes:
            self.pipeline.shrink(0)
            self.came_to_rest()

    def _watch_state(self) -> None:
        if not isinstance(self._optimizer.state, _WatchedState):
            self._optimizer.state = _WatchedState(self._optimizer.state, self._looked_into)

    def _with_hooks(self) -> Callable:
        def step(optimizer: Optimizer, closure: Callable | None = None) -> Any:
            del optimizer
            return self.step(closure)

        return torch.optim.Optimizer.profile_hook_step(step)

    # ---- the step
    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """One update of all parameters. What the optimizer raises is passed on; its state is at rest again then."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._optimizer.param_groups
        self._in_step = True
        self._watch_state()
        try:
            self._arena.adopt()  # somebody may have made state since
            self._follow_groups()
            with self.pipeline.running(self._may_keep, 0 if self._all_leave else self.later_bytes()):
                for group, slices in zip_longest(groups, self._slices, fillvalue=[]):  # groups may be added later
                    self._step_group(group, slices)
        finally:
            self._optimizer.param_groups = groups
            self._in_step = False
        return loss

    def _may_keep(self) -> int:
        most = self.may_keep()
        return 0 if self._all_leave else most

    def _step_group(self, group: dict[str, Any], slices: list[Slice]) -> None:
        parameters = group["params"]
        moved = {id(piece.parameter) for each in slices for piece in each.pieces}
        stay = [parameter for parameter in parameters if id(parameter) not in moved]
        steps = _StepCount(group)
        self._optimizer.param_groups = [group]
        try:
            if stay or not slices:  # first: meanwhile the first slices are on their way
                group["params"] = stay
                self._own_step(self._optimizer)
            while slices:
                count = self.pipeline.batch(slices)
                batch, slices = slices[:count], slices[count:]
                with self.pipeline.on_device(batch) as buffers, self._in_place(batch, buffers) as group["params"]:
                    steps.put_back()
                    self._own_step(self._optimizer)
        finally:
            group["params"] = parameters

    # ---- what the optimizer sees
    @contextmanager
    def _in_place(self, slices: list[Slice], buffers: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The slices' parameters with their state in the buffers; at the end it is at rest again."""
        parts: list[tuple[Piece, torch.Tensor]] = []
        try:
            # One without a gradient is not updated: it does not take part.
            for each, buffer in zip(slices, buffers, strict=True):
                for piece in each.pieces:
                    if piece.parameter.grad is not None:
                        parts.append((piece, self._enter(piece, buffer)))
            # Without any gradient the optimizer gets them as they are: it changes none, but counts its step.
            yield [shown for _, shown in parts] or [piece.parameter for each in slices for piece in each.pieces]
        finally:
            for piece, shown in parts:
                self._leave(piece, shown)

    def _enter(self, piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
        parameter, units = piece.parameter, self._arena.units_of(piece.parameter)
        numel = piece.stop - piece.start
        inside = {
            key: buffer[at : at + numel * units[key].dtype.itemsize].view(units[key].dtype)
            for key, at in piece.at.items()
        }
        state = self._optimizer.state[parameter]
        if piece.whole:
            for key, flat in inside.items():
                if key == MASTER:
                    parameter.data = shaped_like(flat, parameter)
                else:
                    state[key] = shaped_like(flat, parameter)
            return parameter
        # A part of a parameter is a parameter of its own to the optimizer.
        part = inside.get(MASTER)
        part = _cut(parameter.detach(), piece) if part is None else part
        assert parameter.grad is not None
        part.grad = _cut(parameter.grad.contiguous(), piece)  # only read
        self._optimizer.state[part] = {key: self._part_of(key, value, piece, inside) for key, value in state.items()}
        return part

    def _part_of(self, key: str, value: Any, piece: Piece, inside: dict[str, torch.Tensor]) -> Any:
        if key in inside:
            return inside[key]
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape == piece.parameter.shape:
            return _cut(value, piece)
        return value.clone()  # its step: each part advances its own

    def _leave(self, piece: Piece, shown: torch.Tensor) -> None:
        parameter = piece.parameter
        state = self._optimizer.state[parameter]
        if not piece.whole:
            ended = self._optimizer.state.pop(shown)
            for key, value in ended.items() if piece.last else ():
                old = state.get(key)
                if not isinstance(value, torch.Tensor):
                    state[key] = value
                elif isinstance(old, torch.Tensor) and old.shape != parameter.shape:
                    old.copy_(value)  # the step: counted once for all pieces
        for unit in self._arena.units_of(parameter).values():
            self._arena.rest(unit)


class _WatchedState(defaultdict):
    """``optimizer.state`` that tells before an entry is looked at. Copies and pickles are plain ones."""

    def __init__(self, state: Any, before: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._before = before

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


def _watched(name: str) -> Callable:
    own = getattr(defaultdict, name)

    def method(self: _WatchedState, *args: Any) -> Any:
        self._before()
        return own(self, *args)

    return method


# ``__iter__``: ``dict(state)`` and ``{**state}`` would not ask for anything if it were dict's own.
for _name in ("__getitem__", "__iter__", "__repr__", "get", "items", "keys", "pop", "popitem", "setdefault", "values"):
    setattr(_WatchedState, _name, _watched(_name))


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.view(-1)[piece.start : piece.stop]


class _StepCount:
    """The step count that some optimizers keep in the group: each call of theirs advances it."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._had = "step" in group
        step = group.get("step")
        self._before = step.clone() if isinstance(step, torch.Tensor) else step

    def put_back(self) -> None:
        if not self._had:
            self._group.pop("step", None)
        elif isinstance(self._before, torch.Tensor):
            self._group["step"].copy_(self._before)
        else:
            self._group["step"] = self._before


def _without_hooks(step: Callable) -> Callable:
    """The step as its class defines it, below torch's wrapper that calls hooks."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
