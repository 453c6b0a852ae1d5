"""``mindspeed-swap ops``: every name that a swap configuration can use, by layer, with bytes. Imports no torch."""
from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_swap.core.recompute import WHOLE_LAYER
from mindspeed_swap.core.trace import OUTSIDE, StepTrace
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.names import ALIASES
from mindspeed_swap.fine_grained.operators import operators, plain_name
from mindspeed_swap.units import format_bytes

TRACE = "step_trace.json"
_RECORD = "train some steps with --swap-config FILE --swap-report-dir DIR first"


def list_operators(path: str) -> int:
    """Prints a table per layer. ``path``: DIR of --swap-report-dir, or one trace. Raises SettingError."""
    layers: dict[int, list[str]] = {}
    for file in _files(path):
        for layer, rows in _tables(_read(file)):
            layers.setdefault(layer, rows)  # data-parallel ranks have the same
    if not layers:
        raise SettingError(f"{path}: this run did not record the modules of layers: {_RECORD}")
    same: dict[tuple[str, ...], list[int]] = {}
    for layer, rows in sorted(layers.items()):
        same.setdefault(tuple(rows), []).append(layer)
    for rows, numbers in same.items():
        print(f"layer{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}", *rows, "", sep="\n")
    print(
        "Of one microbatch: bytes saved inside that nobody saved before, those of them that can be moved, and their "
        "number.\nA swap configuration counts in calls of what has a *: operators."
    )
    return 0


def _files(path: str) -> list[Path]:
    given = Path(path)
    if given.is_file():
        return [given]
    found = sorted(given.glob(f"rank*/{TRACE}"), key=lambda p: (len(p.parent.name), p.parent.name))
    if not found:
        raise SettingError(f"{path}: no {TRACE} there: {_RECORD}")
    return found


def _read(file: Path) -> StepTrace:
    try:
        return StepTrace.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise SettingError(f"{file}: {error}") from None


def _tables(trace: StepTrace) -> Iterator[tuple[int, list[str]]]:
    """Of the first microbatch."""
    counted = {trace.modules[i].key for i in operators(trace).owner.values()}
    records = [r for r in trace.saved if r.key.layer != OUTSIDE]
    at = [record.saved for record in records]
    by_layer: dict[int, dict[str, list[int]]] = {}  # name -> saved, movable, count, is an operator
    for module in sorted(trace.modules, key=lambda m: (m.begin, -m.end)):
        if module.key.microbatch:
            continue
        inside = records[bisect_right(at, module.begin) : bisect_left(at, module.end)]
        row = by_layer.setdefault(module.key.layer - 1, {}).setdefault(plain_name(module), [0, 0, 0, 0])
        row[0] += sum(record.nbytes for record in inside)
        row[1] += sum(record.nbytes for record in inside if is_candidate(record))
        row[2] += len(inside)
        row[3] |= module.key in counted
    for layer, rows in by_layer.items():
        whole = rows.pop(WHOLE_LAYER, None)
        lines = [("name", "also", "saved", "movable", "storages")]
        for name, row in ([("(the layer)", whole)] if whole else []) + list(rows.items()):
            lines.append((
                "  " * name.count(".") + name + (" *" if row[3] else ""), _also(name), format_bytes(row[0]),
                format_bytes(row[1]), str(row[2]),
            ))  # fmt: skip
        yield layer, list(_aligned(lines))


def _also(name: str) -> str:
    """The same name in aliases, where it has any."""
    aliases = {level: alias for alias, level in ALIASES.items()}
    other = ".".join(aliases.get(level, level) for level in name.split("."))
    return other if other != name else ""


def _aligned(lines: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(line)]
        yield "  " + "  ".join(cells).rstrip()


def _ranges(numbers: Iterable[int]) -> str:
    """0-3, 7"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
