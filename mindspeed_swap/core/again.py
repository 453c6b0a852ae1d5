"""Running a module call again in backward, for what its forward saved and gave up.

Note: [Nothing of the graph changes]
A recomputed call runs its forward once, with its graph, as without us. Of the tensors that this forward saves (and of
its outputs, when others save them) only the names are kept, and its inputs. When backward first wants one of them the
forward runs again on the same inputs, under the same random state; what it then saves is the same, in the same order,
and takes the places of what was given up. That second graph is dropped at once, so gradients are summed in the order in
which they are without recompute, which a checkpoint that runs backward inside backward does not promise. It stops as
soon as all is there: the last matrix product of a layer is seldom run again.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed_swap.core.saved_tensor import Handle, Passed, SavedTensor
from mindspeed_swap.core.trace import ModuleKey

Packed = Handle | Passed


class RandomState:
    """What a forward draws random numbers from. A framework with generators of its own brings a subclass."""

    def __init__(self, device_type: str = "cpu") -> None:
        self._device = None if device_type == "cpu" else getattr(torch, device_type)

    def get(self) -> Any:
        return torch.get_rng_state(), self._device.get_rng_state() if self._device else None

    def set(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        if self._device:
            self._device.set_rng_state(state[1])

    @contextmanager
    def restored(self, state: Any) -> Iterator[None]:
        now = self.get()
        self.set(state)
        try:
            yield
        finally:
            self.set(now)


class _Enough(Exception):
    """Ends a forward of which nothing more is wanted."""


class Call:
    """One forward call of a module that is recomputed. Saves are numbered in the order of that forward."""

    def __init__(
        self,
        key: ModuleKey,
        function: Callable[..., Any],
        arguments: tuple[Any, Any],
        hold: Callable[[torch.Tensor], Packed],
        random: RandomState,
    ) -> None:
        """``hold`` keeps a tensor as a saved tensor is kept, so that it may be moved meanwhile."""
        self.key = key
        leaves, self._spec = tree_flatten(arguments)
        self._leaves = [(hold(x), x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
        self._function = function
        self._random, self._random_state = random, random.get()
        self._autocast = _autocast(next((x for x in leaves if isinstance(x, torch.Tensor)), None))
        self._saves = 0
        # Serials of saved tensors: they own the call, not the other way round.
        self.by_save: dict[int, int] = {}
        self.by_output: dict[int, int] = {}
        self.lock = threading.RLock()  # two threads of autograd may want the same call

    def next_save(self) -> int:
        self._saves += 1
        return self._saves - 1

    def run(
        self,
        unpack: Callable[[Packed], torch.Tensor],
        find: Callable[[int], SavedTensor | None],
        give: Callable[[SavedTensor, torch.Tensor], None],
    ) -> None:
        """Hands every tensor that is still wanted, which ``find`` tells by its serial, to ``give``. Raises RuntimeError
        if the forward differs from the first time."""
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, tuple):
                packed, needs_gradient = leaf
                tensor = unpack(packed)
                if not isinstance(tensor, torch.nn.Parameter):
                    tensor = tensor.detach().requires_grad_(needs_gradient)
                leaf = tensor
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self._spec)
        wanted = {number: saved for number, serial in self.by_save.items() if (saved := find(serial))}
        given = {number: saved for number, serial in self.by_output.items() if (saved := find(serial))}
        number = -1

        def pack(tensor: torch.Tensor) -> None:
            nonlocal number
            number += 1
            saved = wanted.pop(number, None)
            if saved is not None:
                self._check(saved, tensor)
                give(saved, tensor.detach())
            if not wanted and not given:
                raise _Enough

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
        with self._random.restored(self._random_state), self._autocast(), torch.enable_grad(), hooks:
            try:
                outputs = tensors(self._function(*args, **kwargs))
            except _Enough:
                return
        for index, output in enumerate(outputs):
            saved = given.pop(index, None)
            if saved is not None:
                self._check(saved, output)
                give(saved, output.detach())
        if wanted or given:
            raise RuntimeError(self._differs())

    def _check(self, saved: SavedTensor, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().nbytes() != saved.nbytes:
            raise RuntimeError(self._differs())

    def _differs(self) -> str:
        where = f"layer {self.key.layer}" if self.key.layer else "outside the layers"
        return (
            f"recompute of {self.key.name} ({where}, microbatch {self.key.microbatch}): its forward did other things "
            "than the first time, so it depends on more than its arguments and the random state"
        )


class Produced:
    """Outputs of recomputed calls, as long as anybody has them: what saves one need not keep it."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], Call, int]] = {}

    def add(self, call: Call, outputs: list[torch.Tensor]) -> None:
        for index, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            identity = (storage._cdata, tensor._version)

            def forget(ref: Any, identity: tuple[int, int] = identity) -> None:
                if (entry := self._found.get(identity)) is not None and entry[0] is ref:
                    del self._found[identity]

            self._found[identity] = weakref.ref(storage, forget), call, index

    def find(self, saved: SavedTensor) -> tuple[Call, int] | None:
        ref, call, index = self._found.get(saved.identity, (None, None, 0))
        if ref is None or call is None or (storage := ref()) is None or not saved.is_of(storage):
            return None
        return call, index


def tensors(value: Any) -> list[torch.Tensor]:
    """In a structure of arguments or results, in a fixed order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("backward went into the graph of a recompute")


def _autocast(of: torch.Tensor | None) -> Callable[[], AbstractContextManager[Any]]:
    """A function that puts back the autocast that is in force now where that tensor is."""
    device = of.device.type if of is not None else "cpu"
    on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=on)
