"""What a swap configuration says, checked: every wrong value is an error that names file, line and key.

Layers count from 0 over the whole model. What is set is the same on every rank; which of it a rank has is its own.
"""
from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_swap.fine_grained.layers import ALL, NONE, Layers
from mindspeed_swap.fine_grained.names import levels
from mindspeed_swap.fine_grained.yaml_file import FLAG, Document, read_yaml

# What is swapped where the file names nothing.
DEFAULT_OPERATOR = "attention.flash_attention"
DEFAULT_PREFETCH = 1
DEFAULT_KEY = "swap_config.default_prefetch"
_SECTIONS = {
    "swap_config": ("swap", "default_prefetch", "layer_swap", "op_swap"),
    "recompute_config": ("recompute", "select_recompute", "select_comm_recompute"),
}
_NO_EFFECT = "memory_optimize_level"


@dataclass(frozen=True, slots=True)
class Entry:
    """One element of op_swap for one name, or (``name`` empty) of layer_swap."""

    name: str
    value: int  # prefetched so many operators early
    layers: Layers
    key: str  # where it is said

    def release(self, value: int) -> int:
        """Released so many operators late. By the default as many as it is prefetched early; of what is listed only
        the way back can be set."""
        return value if self.key == DEFAULT_KEY else 1


@dataclass(frozen=True, slots=True)
class SwapConfig:
    document: Document = field(repr=False)
    swap: bool
    ops: tuple[Entry, ...]  # by name in the order of their first mention: of entries with one name, the first wins
    layer_swap: tuple[Entry, ...]
    recompute: Layers
    select: dict[str, Layers]
    comm: Layers
    notes: tuple[str, ...]  # what has no effect

    @property
    def patterns(self) -> dict[str, str]:
        """Every name of an operator -> where it is said first."""
        found = {name: f"recompute_config.select_recompute.{name}" for name in self.select}
        for entry in self.ops:
            found.setdefault(entry.name, entry.key)
        return found


def read_swap_config(
    path: str, num_layers: int, stages: int = 1, chunks: int = 1, sequence_parallel: bool = False
) -> SwapConfig:
    """``stages``, ``chunks``: pipeline-parallel size, and model chunks of each stage. Raises SettingError."""
    return _Reader(read_yaml(path), num_layers, stages, chunks).config(sequence_parallel)


class _Reader:
    def __init__(self, document: Document, num_layers: int, stages: int, chunks: int) -> None:
        self._document, self._error = document, document.error
        self._num_layers, self._stages, self._chunks = num_layers, stages, chunks
        self._notes: list[str] = []

    def config(self, sequence_parallel: bool) -> SwapConfig:
        whole = self._document.value
        if not isinstance(whole, dict):
            raise self._error("swap_config", "missing: this file has no sections")
        if "swap_config" not in whole:
            raise self._error("swap_config", f"missing: without it {FLAG} would do nothing")
        self._look_at_the_rest(whole)
        given = self._section(whole, "swap_config")
        swap = self._bool(given, "swap_config.swap", False)
        default = given.get("default_prefetch")
        prefetch = DEFAULT_PREFETCH if default is None else self._count(default, DEFAULT_KEY)
        named = given.get("layer_swap"), given.get("op_swap")
        layer_swap = tuple(self._entries(named[0], "swap_config.layer_swap"))
        ops = tuple(self._entries(named[1], "swap_config.op_swap"))
        self._must_agree(layer_swap)
        by_name: dict[str, list[Entry]] = {}
        for entry in ops:
            by_name.setdefault(entry.name, []).append(entry)
        for same in by_name.values():
            self._must_agree(same)
        if named == (None, None):
            ops = (Entry(DEFAULT_OPERATOR, prefetch, ALL, DEFAULT_KEY),)
        else:
            if default is not None and swap:
                self._notes.append("default_prefetch has no effect beside layer_swap or op_swap")
            self._notes += [f"{e.key}.layers is False: no effect" for e in (*ops, *layer_swap) if not e.layers]
            ops = tuple(entry for same in by_name.values() for entry in same if entry.layers)
            layer_swap = tuple(entry for entry in layer_swap if entry.layers)
        if not swap:
            if named != (None, None):
                self._notes.append("swap is False: layer_swap and op_swap are ignored")
            ops = layer_swap = ()
        return self._with_recompute(whole, swap, ops, layer_swap, sequence_parallel)

    def _with_recompute(
        self, whole: dict[str, Any], swap: bool, ops: tuple[Entry, ...], layer_swap: tuple[Entry, ...], sequence: bool
    ) -> SwapConfig:
        given, prefix = self._section(whole, "recompute_config"), "recompute_config."
        given = {name: value for name, value in given.items() if value is not None}
        read = self._layers if swap else self._first_layers
        recompute = read(given.get("recompute", False), f"{prefix}recompute")
        comm = read(given.get("select_comm_recompute", False), f"{prefix}select_comm_recompute")
        if comm and not sequence:
            raise self._error(f"{prefix}select_comm_recompute", "needs --sequence-parallel: there is no communication")
        if comm:
            self._notes.append("select_comm_recompute: Megatron gathers again in backward anyway, nothing is added")
        select = self._select(given.get("select_recompute", False), f"{prefix}select_recompute", swap)
        if not (ops or layer_swap or recompute or select):
            self._notes.append("nothing is swapped and nothing recomputed; a step is recorded all the same")
        return SwapConfig(self._document, swap, ops, layer_swap, recompute, select, comm, tuple(self._notes))

    # ---- sections and single values
    def _look_at_the_rest(self, whole: dict[str, Any]) -> None:
        """num_layers must be that of this run; what else there is is named once."""
        context, model = self._foreign(whole, "context"), self._foreign(whole, "model")
        model_config = self._foreign(model, "model_config", "model.")
        if _NO_EFFECT in context:
            self._notes.append(f"context.{_NO_EFFECT} has no effect: nothing here corresponds to it")
        if "num_layers" in model_config:
            key, found = "model.model_config.num_layers", model_config["num_layers"]
            if self._count(found, key) != self._num_layers:
                raise self._error(key, f"{found}, but --num-layers is {self._num_layers}: they must be equal")
        rest = [name for name in whole if name not in (*_SECTIONS, "context", "model")]
        rest += [f"context.{name}" for name in context if name != _NO_EFFECT]
        rest += [f"model.{name}" for name in model if name != "model_config"]
        rest += [f"model.model_config.{name}" for name in model_config if name != "num_layers"]
        if rest:
            more = f" and {len(rest) - 8} more" if len(rest) > 8 else ""
            self._notes.append(f"without effect here: {', '.join(rest[:8])}{more}")

    def _foreign(self, whole: dict[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
        """A section of which next to nothing concerns us."""
        given = whole.get(name)
        if isinstance(given, str) and "=" in given:  # so in the documentation: memory_optimize_level=O0
            key, _, value = given.partition("=")
            return {key.strip(): value}
        if given is not None and not isinstance(given, dict):
            raise self._error(prefix + name, f"expected keys, found {given!r:.60}")
        return given or {}

    def _section(self, whole: dict[str, Any], name: str) -> dict[str, Any]:
        given = whole.get(name)
        if given is None:
            given = {}
        self._keys(given, name, _SECTIONS[name])
        return given

    def _keys(self, given: Any, key: str, known: Sequence[str], needed: Sequence[str] = ()) -> None:
        if not isinstance(given, dict):
            raise self._error(key, f"expected keys ({', '.join(known)}), found {given!r:.60}")
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                raise self._error(f"{key}.{name}", f"unknown: {hint}")
        for name in needed:
            if given.get(name) is None:
                raise self._error(f"{key}.{name}", "missing")

    def _bool(self, given: dict[str, Any], key: str, default: bool) -> bool:
        value = given.get(key.rpartition(".")[2])
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._error(key, f"expected True or False, found {value!r:.60}")
        return value

    def _count(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._error(key, f"expected a whole number from 0, found {value!r:.60}")
        return value

    # ---- layers
    def _layers(self, value: Any, key: str) -> Layers:
        """Numbers of layers in a list, also in one list per stage; True: all of them."""
        if isinstance(value, bool):
            return ALL if value else NONE
        if not isinstance(value, list):
            raise self._error(key, f"expected a list of layer numbers, True or False, found {value!r:.60}")
        if not value:
            raise self._error(key, "empty: it names no layer (False says so)")
        nested = isinstance(value[0], list)
        numbers: set[int] = set()
        for i, row in enumerate(value):
            if isinstance(row, list) != nested:
                raise self._error(f"{key}[{i}]", "layer numbers and lists of them are mixed")
            for j, number in enumerate(row if nested else [row]):
                numbers.add(self._layer(number, f"{key}[{i}][{j}]" if nested else f"{key}[{i}]"))
        if not numbers:
            raise self._error(key, "empty: it names no layer (False says so)")
        return Layers(frozenset(numbers))

    def _layer(self, number: Any, key: str) -> int:
        if isinstance(number, bool) or not isinstance(number, int):
            raise self._error(key, f"expected a layer number, found {number!r:.60}")
        if not 0 <= number < self._num_layers:
            raise self._error(key, f"layer {number}: this model has layers 0 to {self._num_layers - 1}")
        return number

    def _first_layers(self, value: Any, key: str) -> Layers:
        """What the keys of recompute mean without swap: how many layers of each pipeline stage, from its first."""
        if isinstance(value, bool):
            return ALL if value else NONE
        if not isinstance(value, list) or not value:
            raise self._error(key, f"without swap: expected True, False or a number per stage, found {value!r:.60}")
        nested = isinstance(value[0], list)
        rows = value if nested else [value]
        if nested and len(rows) != self._chunks:
            raise self._error(key, f"{len(rows)} lists for {self._chunks} model chunks in a stage")
        counts = []
        for i, row in enumerate(rows):
            where = f"{key}[{i}]" if nested else key
            if not isinstance(row, list) or len(row) != self._stages:
                raise self._error(where, f"expected {self._stages} numbers, one per pipeline stage, found {row!r:.60}")
            counts.append(tuple(self._count(number, f"{where}[{j}]") for j, number in enumerate(row)))
        return Layers(first=tuple(counts)) if any(any(row) for row in counts) else NONE

    # ---- lists of entries
    def _entries(self, value: Any, key: str) -> Iterator[Entry]:
        if value is None:
            return
        if not isinstance(value, list) or not value:
            raise self._error(key, f"expected a list with at least one element, found {value!r:.60}")
        known = ("backward_prefetch", "layers", "op_name")[: 3 if key.endswith("op_swap") else 2]
        for i, item in enumerate(value):
            where = f"{key}[{i}]"
            self._keys(item, where, known, known)
            prefetch = self._count(item["backward_prefetch"], f"{where}.backward_prefetch")
            layers = self._layers(item["layers"], f"{where}.layers")
            for name in self._op_names(item["op_name"], f"{where}.op_name") if len(known) > 2 else [""]:
                yield Entry(name, prefetch, layers, where)

    def _op_names(self, value: Any, key: str) -> list[str]:
        names = value if isinstance(value, list) else [value]
        if not names:
            raise self._error(key, "empty: it names no operator")
        for i, name in enumerate(names):
            self._op_name(name, f"{key}[{i}]" if isinstance(value, list) else key)
        return list(dict.fromkeys(names))

    def _op_name(self, name: Any, key: str) -> None:
        if not isinstance(name, str):
            raise self._error(key, f"expected the name of an operator, found {name!r:.60}")
        try:
            levels(name)
        except ValueError as error:
            raise self._error(key, str(error)) from None

    def _must_agree(self, entries: Sequence[Entry]) -> None:
        """Entries of one name: no layer with two values, and nothing beside one that has all layers."""
        for i, entry in enumerate(entries):
            for before in entries[:i]:
                if ALL in (entry.layers, before.layers):
                    one, other = (entry, before) if entry.layers == ALL else (before, entry)
                    raise self._error(f"{one.key}.layers", f"True has all layers already: remove it or {other.key}")
                both = (entry.layers.chosen or frozenset()) & (before.layers.chosen or frozenset())
                if both and entry.value != before.value:
                    raise self._error(
                        f"{entry.key}.backward_prefetch",
                        f"Inconsistent 'backward_prefetch' values: {entry.value} here and {before.value} in "
                        f"{before.key} for layer {min(both)}",
                    )

    def _select(self, value: Any, key: str, swap: bool) -> dict[str, Layers]:
        """Name of an operator -> layers. Without swap also a list of names: in all layers."""
        if value is False:
            return {}
        if isinstance(value, list) and not swap:
            value = dict.fromkeys(self._op_names(value, key), True)
        if not isinstance(value, dict):
            raise self._error(key, f"expected False or 'operator': layers, found {value!r:.60}")
        found = {}
        for name, layers in value.items():
            self._op_name(name, f"{key}.{name}")
            found[name] = (self._layers if swap else self._first_layers)(layers, f"{key}.{name}")
        return {name: layers for name, layers in found.items() if layers}
