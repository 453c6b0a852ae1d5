"""Plans as files: ``--swap-plan-save FILE`` and ``--swap-plan FILE``, one file per rank. Pure; imports no torch.

A file holds the plans of all shapes of a step that the rank has met, by (microbatches per step, size class of what
enters the first layer).
"""
from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_swap.core.checked import first_difference
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.errors import SettingError
from mindspeed_swap.files import replace_file

FILE_VERSION = 1
# (microbatches per step, size class)
Shape = tuple[int, int]


def size_class(nbytes: int) -> int:
    """Number of the class: four to an octave, so members differ by less than a quarter. 0 bytes are class 0."""
    if nbytes < 4:
        return nbytes
    octave = nbytes.bit_length() - 1
    return 4 * (octave - 1) + (nbytes >> (octave - 2)) % 4


def rank_file(path: str, rank: int, ranks: int) -> Path:
    """``{rank}`` is replaced; without it several ranks add their number."""
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank)))
    return Path(f"{path}.rank{rank}" if ranks > 1 else path)


def save_plans(path: Path, rank: int, plans: Mapping[Shape, Plan]) -> None:
    """Replaces the file as a whole. Raises OSError."""
    content = {
        "version": FILE_VERSION,
        "rank": rank,
        "plans": {f"{shape[0]}x{shape[1]}": json.loads(plan.to_json()) for shape, plan in plans.items()},
    }
    replace_file(path, json.dumps(content) + "\n")


def load_plans(path: Path, rank: int, model: str) -> dict[Shape, Plan]:
    """Raises SettingError naming the first thing that is not of this run: version, rank, a field of ``model``."""
    name = f"--swap-plan {path}"
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        others = sorted(path.parent.glob(f"{glob.escape(path.name)}.rank*"))
        if others:
            told = f"is not there, but {others[0].name} is, of a run with more ranks: search again"
            raise SettingError(f"{name}: {told}") from None
        raise SettingError(f"{name}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{name}: is damaged ({error}): search again") from None
    found = content.get("version") if isinstance(content, dict) else None
    if found != FILE_VERSION:
        raise SettingError(f"{name}: file version {found}, this release reads {FILE_VERSION}: search again")
    if content.get("rank") != rank:
        raise SettingError(f"{name}: is the plan of rank {content.get('rank')}, this is rank {rank}: use {{rank}}")
    plans = {}
    try:
        for shape, plan in content["plans"].items():
            microbatches, number = map(int, shape.split("x"))
            plans[microbatches, number] = Plan.from_json(json.dumps(plan))
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise SettingError(f"{name}: is damaged ({error}): search again") from None
    if not plans:
        raise SettingError(f"{name}: holds no plan: search again")
    for plan in plans.values():
        if other := first_difference(plan.model, model):
            raise SettingError(f"{name}: was made for {other}: search again without --swap-plan")
    return plans
