"""``--virtual-optimizer all | GB | GB GB ...``: how much of each pipeline stage's moments goes to host memory.

GB is 1024^3 bytes per rank of the stage. One value holds for every stage, several are one per stage.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import GIB, number_of_gib

FLAG = "--virtual-optimizer"
ALL = "all"
MODES = ("auto", "mapped", "streamed")


@dataclass(frozen=True, slots=True)
class VirtualOptions:
    """What the user asked of the virtual optimizer."""

    amounts: tuple[int | None, ...]  # bytes per rank, for each pipeline stage; None: all of them
    mode: str = "auto"  # one of MODES
    master: bool = False  # the fp32 main parameters too


def virtual_options(args: argparse.Namespace) -> VirtualOptions | None:
    """From Megatron's parsed arguments; None if the flag was not given. Raises SettingError."""
    words, mode, master = args.virtual_optimizer, args.virtual_optimizer_mode, args.virtual_optimizer_master
    if words is None:
        for setting, given in (("mode", mode != "auto"), ("master", master)):
            if given:
                raise SettingError(f"{FLAG}-{setting} changes nothing without {FLAG}; give {FLAG} too, for example all")
        return None
    return VirtualOptions(parse_amounts(words, args.pipeline_model_parallel_size), mode, master)


def parse_amounts(words: Sequence[str], stages: int) -> tuple[int | None, ...]:
    """The flag's values -> bytes for each of ``stages`` pipeline stages, None for ``all``. Raises SettingError."""
    if ALL in words:
        if len(words) > 1:
            raise SettingError(f"{FLAG} {' '.join(words)}: {ALL!r} stands alone; give {ALL!r}, or numbers of GB only")
        return (None,) * stages
    amounts = [_amount(word) for word in words]
    if len(amounts) not in (1, stages):
        values = f"{len(amounts)} values" if len(amounts) != 1 else "1 value"
        choices = "1 value" if stages == 1 else f"1 or {stages}"
        raise SettingError(f"{FLAG}: {values} for {stages} pipeline stage{'s'[: stages > 1]}; give {choices}")
    if not any(amounts):
        raise SettingError(
            f"{FLAG} {' '.join(words)}: moves nothing; give {ALL!r} or a number of GB above 0, or leave the flag out"
        )
    return tuple(amounts if len(amounts) == stages else amounts * stages)


def _amount(word: str) -> int:
    value = number_of_gib(word)
    if not value >= 0:
        raise SettingError(f"{FLAG} {word}: expected {ALL!r} or numbers of GB (1024^3 bytes), none below 0")
    return int(value * GIB)
