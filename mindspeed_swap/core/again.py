"""Running a module call again in backward, for what its forward saved and gave up.

Note: [Nothing of the graph changes]
A recomputed call runs its forward once, with its graph, as without us. Of the tensors that this forward saves (and of
its outputs, when others save them) only the names are kept, and its inputs. When backward first wants one of them the
forward runs again on the same inputs, under the same random state; what it then saves is the same, in the same order,
and takes the places of what was given up. That second graph is dropped at once, so gradients are summed in the order in
which they are without recompute, which a checkpoint that runs backward inside backward does not promise.

Note: [Where it stops]
It stops where a module inside is called and nothing more is wanted than what that module is given: the last matrix
product of a layer is not run again. Elsewhere it must not be interrupted: an autograd Function that saves for backward,
stopped in the middle, leaks what it was saving. Attributes that modules were in the middle of setting are put back.

Note: [Pointwise]
A call may also be run again but for the modules inside it: these are not called, what they returned the first time is
kept and returned once more. So an activation function between two products is recomputed without either product. The
same is done in any call with a module that must not run twice, as one that counts what goes through it.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

from mindspeed_swap.core.saved_tensor import Dropped, Handle, Passed, SavedTensor
from mindspeed_swap.core.trace import ModuleKey

Packed = Handle | Passed
Identity = tuple[int, int]
# Of what a call has dropped: the serial of a saved tensor, or one that is in no books. They own the call, not it them.
Name = int | weakref.ref[Dropped]
# Told of a module called while a call runs again: its arguments, whether it must not. A value: what it returns, unrun.
OnModule = Callable[[tuple[Any, Any], bool], tuple[Any] | None]
# Gives what was kept, in its order.
Replay = Callable[[], Any]


def packed_state(state: torch.Tensor) -> bytes:
    """Of a generator, outside any allocator of torch: thousands of calls may wait at once, each with a few KiB."""
    return state.numpy().tobytes()


def unpacked_state(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class RandomState:
    """What a forward draws random numbers from. A framework with generators of its own brings a subclass."""

    def __init__(self, device_type: str = "cpu") -> None:
        self._sources: list[Any] = [torch, *([] if device_type == "cpu" else [getattr(torch, device_type)])]

    def get(self) -> Any:
        return tuple(packed_state(source.get_rng_state()) for source in self._sources)

    def set(self, state: Any) -> None:
        for source, packed in zip(self._sources, state, strict=True):
            source.set_rng_state(unpacked_state(packed))

    @contextmanager
    def restored(self, state: Any) -> Iterator[None]:
        now = self.get()
        self.set(state)
        try:
            yield
        finally:
            self.set(now)


class _Enough(BaseException):
    """Ends a forward of which nothing more is wanted. No Exception: a forward that falls back on something else when a
    module fails must not do so now."""


@contextmanager
def may_stop(args: Sequence[Any]) -> Iterator[None]:
    """Around a call in a forward that may end before it does: modules in ``args`` then are as they were."""
    modules = [(arg, dict(vars(arg))) for arg in args if isinstance(arg, torch.nn.Module)]
    try:
        yield
    except _Enough:
        for module, before in modules:
            for name in vars(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)
        raise


@dataclass(slots=True, eq=False)
class _Held:
    """A tensor among the arguments of a call."""

    packed: Packed
    needs_gradient: bool
    attributes: dict[str, Any]  # that its users have given it


class Call:
    """One forward call of a module that is recomputed. Saves are numbered in the order of that forward."""

    def __init__(
        self,
        key: ModuleKey,
        function: Callable[..., Any],
        arguments: tuple[Any, Any],
        hold: Callable[[torch.Tensor], Packed],
        random: RandomState,
        pointwise: bool = False,
    ) -> None:
        """``hold`` keeps a tensor as a saved tensor is kept, so that it may be moved meanwhile. ``pointwise``: see
        Note [Pointwise]."""
        self.key = key
        self.pointwise = pointwise
        self._hold = hold
        # Of modules inside that do not run again, by number, in the order in which they ended: what each returned, and
        # the random state after it; how many of them will be asked.
        self._answers: dict[int, tuple[list[Any], Any, Any]] = {}
        self._needed = 0
        self.gave: set[int] = set()  # storages of these, which are kept: the call has not made them
        self.kept: list[Any] = []  # what is not asked of the device again
        leaves, self._spec = tree_flatten(arguments)
        self._leaves = self._held(leaves)
        self._function = function
        self._random, self._random_state = random, random.get()
        self._has_grad = torch.is_grad_enabled()  # a frozen part has not, and may do what autograd does not allow
        self._autocast = _autocast({"cpu", *(x.device.type for x in leaves if isinstance(x, torch.Tensor))})
        self._saves = self._entries = 0
        self._inside: list[tuple[int, list[Identity]]] = []  # modules that run inside: number, what they were given
        self._by_save: dict[int, list[Name]] = {}
        self._by_input: dict[tuple[int, int], list[Name]] = {}
        self._by_output: dict[int, list[Name]] = {}
        self.lock = threading.RLock()  # two threads of autograd may want the same call

    def _held(self, leaves: list[Any]) -> list[Any]:
        """One that is there twice is one: attention asks whether its query is its key."""
        found: dict[int, _Held] = {}
        for x in leaves:
            if isinstance(x, torch.Tensor) and not x.is_inference() and id(x) not in found:
                found[id(x)] = _Held(self._hold(x), x.requires_grad, dict(vars(x)))
        return [found.get(id(x), x) for x in leaves]

    def next_save(self) -> int:
        self._saves += 1
        return self._saves - 1

    @contextmanager
    def module(self, arguments: tuple[Any, Any]) -> Iterator[int]:
        """A module is called inside, in the first forward. Gives its number."""
        given = [(tensor.untyped_storage()._cdata, tensor._version) for tensor in tensors(arguments)]
        number = self._entries
        self._inside.append((number, given))
        self._entries += 1
        try:
            yield number
        finally:
            self._inside.pop()

    def returned(self, number: int, result: Any) -> None:
        """A module inside that will not run again is over."""
        leaves, spec = tree_flatten(result)
        self._answers[number] = self._held(leaves), spec, self._random.get()
        self.gave.update(tensor.untyped_storage()._cdata for tensor in tensors(result))

    def forward_is_over(self) -> None:
        for number in list(self._answers)[self._needed :]:
            del self._answers[number]

    def drops(self, name: Name, identity: Identity, number: int) -> list[Name]:
        """It is given up: save ``number`` of the first forward. Gives all that are made together with it, which others
        may join."""
        together = self.drops_input(name, identity)
        if together is None:
            together = self._by_save[number] = [name]
            self._needed = len(self._answers)
        return together

    def drops_input(self, name: Name, identity: Identity) -> list[Name] | None:
        """The same, if the module that runs inside was given it."""
        if not self._inside or identity not in self._inside[-1][1]:
            return None
        entry, given = self._inside[-1]
        together = self._by_input.setdefault((entry, given.index(identity)), [])
        together.append(name)
        self._needed = len(self._answers)
        return together

    def drops_output(self, name: Name, index: int) -> None:
        self._by_output.setdefault(index, []).append(name)

    def run(
        self,
        unpack: Callable[[Packed], torch.Tensor],
        find: Callable[[Name], SavedTensor | Dropped | None],
        give: Callable[[SavedTensor | Dropped, torch.Tensor], None],
        watch: Callable[[OnModule, Replay], AbstractContextManager[None]],
    ) -> None:
        """Hands every tensor that is still wanted, which ``find`` tells by its name, to ``give``. ``watch`` has a
        function told of every module called inside, and one asked for what was kept. Raises RuntimeError if the forward
        differs from the first time."""

        def free(leaves: list[Any]) -> list[Any]:
            made: dict[int, torch.Tensor] = {}
            for leaf in leaves:
                if isinstance(leaf, _Held) and id(leaf) not in made:
                    tensor = unpack(leaf.packed)
                    if not isinstance(tensor, torch.nn.Parameter):
                        tensor = tensor.detach().requires_grad_(leaf.needs_gradient)
                        vars(tensor).update(leaf.attributes)
                    made[id(leaf)] = tensor
            return [made.get(id(leaf), leaf) for leaf in leaves]

        args, kwargs = tree_unflatten(free(self._leaves), self._spec)

        def wanted(places: Mapping[Any, list[Name]]) -> dict[Any, list[SavedTensor | Dropped]]:
            found = ((place, [saved for name in names if (saved := find(name))]) for place, names in places.items())
            return {place: some for place, some in found if some}

        by_save, by_input, by_output = wanted(self._by_save), wanted(self._by_input), wanted(self._by_output)
        saves, entries, kept = count(), count(), iter(self.kept)

        def replay() -> Any:
            for value in kept:
                return value
            raise RuntimeError(self._differs())

        def settle(some: Iterable[SavedTensor | Dropped], tensor: torch.Tensor) -> None:
            for saved in some:
                if tensor.untyped_storage().nbytes() != saved.nbytes:
                    raise RuntimeError(self._differs())
                give(saved, tensor)

        def pack(tensor: torch.Tensor) -> None:
            settle(by_save.pop(next(saves), ()), tensor)

        def enter(arguments: tuple[Any, Any], once: bool) -> tuple[Any] | None:
            entry = next(entries)
            for index, tensor in enumerate(tensors(arguments)) if by_input else ():
                settle(by_input.pop((entry, index), ()), tensor)
            if not (by_save or by_input or by_output):
                raise _Enough
            if (answer := self._answers.get(entry)) is None:
                if once:  # it raised the first time
                    raise RuntimeError(self._differs())
                return None
            held, spec, state = answer
            self._random.set(state)
            return (tree_unflatten(free(held), spec),)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
        grad = torch.set_grad_enabled(self._has_grad)
        with self._random.restored(self._random_state), self._autocast(), grad, hooks, watch(enter, replay):
            try:
                with may_stop(args):
                    outputs = tensors(self._function(*args, **kwargs))
            except _Enough:
                return
        for index, output in enumerate(outputs):
            settle(by_output.pop(index, ()), output)
        if by_save or by_input or by_output:
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
        self._found: dict[Identity, tuple[weakref.ref[torch.UntypedStorage], Call, int]] = {}

    def __contains__(self, identity: Identity) -> bool:
        """Perhaps: what had this address may be gone."""
        return identity in self._found

    def clear(self) -> None:
        self._found.clear()

    def add(self, call: Call, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """``inputs``: an output that is one of them was not made by it, or is not to be."""
        given = call.gave | {tensor.untyped_storage()._cdata for tensor in inputs}
        for index, tensor in enumerate(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata in given:
                continue
            identity = (storage._cdata, tensor._version)

            def forget(ref: Any, identity: Identity = identity) -> None:
                if (entry := self._found.get(identity)) is not None and entry[0] is ref:
                    del self._found[identity]

            self._found[identity] = weakref.ref(storage, forget), call, index

    def find(self, saved: SavedTensor) -> tuple[Call, int] | None:
        ref, call, index = self._found.get(saved.identity, (None, None, 0))
        if ref is None or call is None or (storage := ref()) is None or not saved.is_of(storage):
            return None
        return call, index


def tensors(value: Any) -> list[torch.Tensor]:
    """In a structure of arguments or results, in the order of ``tree_flatten``, which takes several times as long.
    Without those that have no storage, or no version: autograd keeps none of them in a way that concerns us."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_inference():
            found.append(value)
    elif kind is tuple or kind is list:
        for part in value:
            _collect(part, found)
    elif kind is dict:
        for part in value.values():
            _collect(part, found)
    elif kind in SUPPORTED_NODES or isinstance(value, tuple):  # also named tuples
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.Tensor):
                _collect(leaf, found)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("backward went into the graph of a recompute")


def _autocast(devices: set[str]) -> Callable[[], AbstractContextManager[Any]]:
    """A function that puts back the autocast that is in force now, on all of these devices that know one."""
    known = [device for device in sorted(devices) if torch.amp.autocast_mode.is_autocast_available(device)]
    was = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in known]

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            for device, on, dtype in was:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
            yield

    return restored
