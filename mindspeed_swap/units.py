"""Sizes as people write them. GB in a flag is 1024^3 bytes; a link's GBPS is 10^9 bytes per second."""
from __future__ import annotations

import argparse
import math
import re

from mindspeed_swap.errors import SettingError

MIB = 1 << 20
GIB = 1 << 30
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
MOST_BYTES = 1 << 62  # no machine has as much; and so an int holds it
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, setting: str) -> int:
    """``"600MiB"`` or a plain number of bytes -> bytes. Raises SettingError naming the setting."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    value = float(match.group(1)) * unit if match and unit else 0.0
    if not 1 <= value <= MOST_BYTES:
        raise SettingError(f"{setting}={text!r}: expected a size above 0 such as 600MiB, 1.5GiB or a number of bytes")
    return int(value)


def number_of_gib(text: str) -> float:
    """Of a flag, without an end that no machine has; NaN if it is none."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if abs(value) * GIB <= MOST_BYTES else math.nan


def gib_argument(text: str) -> float:
    """For argparse, whose error it raises."""
    value = number_of_gib(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of GB (1024^3 bytes) above 0, such as 30 or 1.5")
    return value


def enough_gib(nbytes: float) -> str:
    """For a flag that takes GB: no less, with two digits."""
    return f"{math.ceil(nbytes / GIB * 100) / 100:.2f}"


def format_bytes(nbytes: float) -> str:
    """``11.2 GiB`` / ``600.0 MiB``: GiB from 1 GiB up, MiB below."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
