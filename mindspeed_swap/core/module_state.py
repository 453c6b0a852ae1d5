"""What modules keep from one call to the next. A call that changes it must not run twice: a running mean would move
twice, and that changes the result. Nor one that would find it changed: it would make other things."""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

_Place = tuple[torch.nn.Module, str]
_HOLDS_TENSORS = ("_buffers", "_parameters")


def keepers_in(function: Callable[..., Any], arguments: object) -> Iterator[torch.nn.Module | torch.Generator]:
    """Of state, that a call is given, or that its function belongs to or brings along."""
    while isinstance(function, functools.partial):
        arguments, function = (arguments, function.args, function.keywords), function.func
    owner = getattr(function, "__self__", None)
    brought = _contents(getattr(function, "__closure__", None) or ())
    for leaf in (owner, *brought, *tree_leaves(arguments)):
        if isinstance(leaf, (torch.nn.Module, torch.Generator)):
            yield leaf


def _contents(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def _buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Those of a ScriptModule are in C++, and in no dict."""
    found: Any = module._buffers
    return found if isinstance(found, dict) else dict(found.items())


class _Kinds(dict[type, Any]):
    """What attributes of a type are, as far as they may be state. Flags are not: they are set to what they are."""

    def __missing__(self, of: type) -> type | None:
        kinds = (torch.Tensor, torch.Generator, dict, list, tuple)
        self[of] = float if of in (int, float) else next((kind for kind in kinds if issubclass(of, kind)), None)
        return self[of]


_KINDS = _Kinds()


class ModuleState:
    """Of modules, and of all modules inside: parameters, buffers, and attributes that are tensors, dicts or lists of
    tensors, numbers or generators; as they were.

    What is not seen: what is changed through ``data`` (its version is another one), what other objects hold, and an
    attribute, not a buffer, that the call itself puts another tensor in the place of, as of the last input: most of
    these are no state.
    """

    def __init__(self, keepers: Iterable[torch.nn.Module | torch.Generator]) -> None:
        self._numbers: dict[_Place, float] = {}
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._found: dict[_Place, tuple[torch.Tensor | None, int]] = {}
        # Of a call that is over: attributes, which are not held for this.
        self._attributes: list[tuple[_Place, weakref.ref[torch.Tensor], int]] = []
        for outer in keepers:
            if isinstance(outer, torch.Generator):
                self._generators[outer] = outer.get_state()
                continue
            for module in outer.modules():
                self._look_at(module)

    def _look_at(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in _buffers_of(module).items():
                self._add(module, name, tensor)
        for name, value in vars(module).items():
            kind = _KINDS[type(value)]
            if kind is None:  # most of them
                continue
            if kind is float:
                self._numbers[module, name] = value
            elif kind is torch.Tensor:
                self._add(module, name, value)
            elif kind is torch.Generator:
                self._generators[value] = value.get_state()
            elif value and name != "_modules":
                self._look_into(module, name, value)

    def _look_into(self, module: torch.nn.Module, name: str, value: Any) -> None:
        for inner, tensor in value.items() if isinstance(value, Mapping) else enumerate(value):
            if name in _HOLDS_TENSORS:
                self._add(module, str(inner), tensor)
            elif isinstance(tensor, torch.Tensor):
                self._add(module, f"{name}.{inner}", tensor)

    def _add(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self._found[module, name] = None, 0
        elif not is_lazy(tensor) and not tensor.is_inference():
            self._found[module, name] = tensor, tensor._version

    @property
    def changed(self) -> bool:
        """Something was changed in place, drawn or counted; a buffer was replaced, or an attribute after the call."""
        for (module, name), ref, version in self._attributes:
            there = ref()
            if there is None or there._version != version or vars(module).get(name) is not there:
                return True
        if any(vars(module).get(name) != number for (module, name), number in self._numbers.items()):
            return True
        if not all(torch.equal(generator.get_state(), state) for generator, state in self._generators.items()):
            return True
        return any(
            (tensor is not None and tensor._version != version) or _buffers_of(module).get(name, tensor) is not tensor
            for (module, name), (tensor, version) in self._found.items()
        )

    def leave_out(self, part: ModuleState) -> None:
        """The state of a part that will not run again with the rest."""
        for place in part._found:
            self._found.pop(place, None)
        for place in part._numbers:
            self._numbers.pop(place, None)
        for generator in part._generators:
            self._generators.pop(generator, None)

    def is_over(self) -> None:
        """The call is: what it has put something else in the place of was no argument of it. Nor are parameters looked
        at any longer, which an optimizer changes, nor numbers: Megatron tells each layer the microbatch. From now on
        only buffers are held: what modules remember of their last input may have a graph."""
        found, self._found = self._found, {}
        self._numbers.clear()
        self._generators.clear()  # the calls after it draw from them too; and one that draws does not run again
        for place, (tensor, version) in found.items():
            module, name = place
            if name in _buffers_of(module):
                self._found[place] = tensor, version
            elif vars(module).get(name) is tensor and tensor is not None:
                self._attributes.append((place, weakref.ref(tensor), version))
