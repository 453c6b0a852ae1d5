"""The lines ``-INFO - Set ...`` of a rank: what was set in each of its layers, in a file of their own.

The lines report the setting. What of it had no effect is said in a block before them. Empty lines around them keep
``grep -C 1`` from printing anything else.
"""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mindspeed_swap.files import replace_file
from mindspeed_swap.fine_grained.names import is_word, levels
from mindspeed_swap.fine_grained.parts import Parts

FOLDER = Path("output/msrun")


def set_lines(parts: Parts) -> list[str]:
    lines = []
    for layer in sorted(parts.names):
        if layer in parts.full:
            lines.append(f"Set full recompute at layer {layer}")
        else:
            names = [name for name, layers in parts.select.items() if layer in layers]
            if select := [text for name in names for text in _shown(parts, name, layer)]:
                lines.append(f"Set select recompute at layer {layer}: {', '.join(select)}")
        if layer in parts.comm:
            lines.append(f"Set select comm recompute at layer {layer}")
        whole = next((entry for entry in parts.config.layer_swap if layer in entry.layers), None)
        if whole is not None:
            lines.append(f"Set layer swap at layer {layer} and value is: {whole.value}")
        values: dict[str, int] = {}
        for entry in parts.config.ops:
            if layer in entry.layers:
                values.setdefault(entry.name, entry.value)
        swapped = [
            # A part of the layer itself has a dot before it, a part of a part has one in it.
            f"{text if '.' in text else '.' + text}, value={value}"
            for name, value in values.items()
            for text in _shown(parts, name, layer)
        ]
        if swapped:
            lines.append(f"Set op_swap at layer {layer}: {', '.join(swapped)}")
    return lines


def _shown(parts: Parts, pattern: str, layer: int) -> list[str]:
    """What the line calls the match: the user's word, or what a regular expression found."""
    matched = parts.matched(pattern, layer)
    return [".".join(levels(pattern))] if matched and is_word(pattern) else matched


def write_log(rank: int, reasons: Iterable[str], lines: Iterable[str]) -> Path:
    """Replaces what an earlier run left. Raises OSError."""
    path = FOLDER / f"worker_{rank}.log"
    text = [*(f"-INFO - {reason}" for reason in reasons), "", *(f"-INFO - {line}" for line in lines), ""]
    replace_file(path, "".join(f"{line}\n" for line in text))
    return path
