"""``mindspeed-swap ops``: every name that a swap configuration can use, by layer, with bytes. Imports no torch."""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

from mindspeed_swap.core.recompute import WHOLE_LAYER
from mindspeed_swap.core.trace import StepTrace, plain_name
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.names import ALIASES
from mindspeed_swap.fine_grained.operators import operators
from mindspeed_swap.report.reader import TRACE_FILE, read_trace, trace_files
from mindspeed_swap.units import format_bytes

_RECORD = "train some steps with --swap-config FILE --swap-report-dir DIR first"


def list_operators(path: str) -> int:
    """Prints a table per layer. ``path``: DIR of --swap-report-dir, or one trace. Raises SettingError."""
    layers: dict[int, list[str]] = {}
    files = trace_files(path) if Path(path).exists() else []
    if not files:
        raise SettingError(f"{path}: no {TRACE_FILE} there: {_RECORD}")
    for file in files:
        for layer, rows in _tables(read_trace(file)):
            layers.setdefault(layer, rows)  # data-parallel ranks have the same
    if not layers:
        raise SettingError(f"{path}: this run did not record the modules of layers: {_RECORD}")
    same: dict[tuple[str, ...], list[str]] = {}
    for layer, rows in sorted(layers.items()):
        same.setdefault(tuple(rows), []).append(str(layer))
    for rows, numbers in same.items():
        print(f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}", *rows, "", sep="\n")
    print(
        "Of one microbatch: bytes saved inside that nobody saved before, those of them that can be moved, and their "
        "number.\nA swap configuration counts in calls of what has a *: operators."
    )
    return 0


def _tables(trace: StepTrace) -> Iterator[tuple[int, list[str]]]:
    """Of the first microbatch: layer, and the lines about it."""
    counted = {trace.modules[i].key for i in operators(trace).owner.values()}
    at = [record.saved for record in trace.saved]
    layers: dict[int, dict[str, list[int]]] = {}  # name -> bytes, movable ones, number of storages, is an operator
    for module in sorted(trace.modules, key=lambda m: (m.begin, -m.end)):
        if module.key.microbatch:
            continue
        inside = trace.saved[bisect_right(at, module.begin) : bisect_left(at, module.end)]
        name = "(the layer)" if module.key.name == WHOLE_LAYER else plain_name(module.key)
        row = layers.setdefault(module.key.layer - 1, {}).setdefault(name, [0, 0, 0, 0])
        row[0] += sum(record.nbytes for record in inside)
        row[1] += sum(record.nbytes for record in inside if is_candidate(record))
        row[2] += len(inside)
        row[3] |= module.key in counted
    for layer, rows in layers.items():
        lines = [f"  {'name':42} {'also':28} {'saved':>10} {'movable':>10}  storages"]
        for name, (saved, movable, storages, is_operator) in rows.items():
            shown = "  " * name.count(".") + name + (" *" if is_operator else "")
            sizes = f"{format_bytes(saved):>10} {format_bytes(movable):>10}"
            lines.append(f"  {shown:42} {_also(name):28} {sizes} {storages:>9}")
        yield layer, lines


def _also(name: str) -> str:
    """The same name in aliases, where it has any."""
    aliases = {level: alias for alias, level in ALIASES.items()}
    other = ".".join(aliases.get(level, level) for level in name.split("."))
    return other if other != name else ""
