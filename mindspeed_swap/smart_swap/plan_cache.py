"""Found policies are kept: ``--swap-plan-cache DIR`` has the plans of every model, layout, device and release that ran
with it, and which plans did not fit. A run that finds its own does not search.

A file per rank in a folder per key. Pure; imports no torch.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.errors import SettingError
from mindspeed_swap.files import replace_file
from mindspeed_swap.smart_swap.plan_files import Shape, load_plans, save_plans

# Digests kept per rank at most. A search makes a few.
MOST_FAILED = 100


def digest(plan: Plan) -> str:
    """Of what a plan does."""
    return hashlib.sha256(repr(plan.decisions).encode()).hexdigest()[:16]


class PlanCache:
    def __init__(self, folder: str, key: Mapping[str, object], rank: int) -> None:
        """``key``: by name, everything that decides whether a plan found here fits."""
        self._model = " ".join(f"{name}={value}" for name, value in key.items())
        self.folder = Path(folder) / hashlib.sha256(self._model.encode()).hexdigest()[:16]
        self._rank = rank
        self._plans, self._failed = self.folder / f"rank{rank}.json", self.folder / f"rank{rank}.failed.json"

    def load(self, model: str) -> tuple[dict[Shape, Plan], set[str]]:
        """Plans by shape, and the digests of those that did not fit. What cannot be read is not there."""
        plans: dict[Shape, Plan] = {}
        failed: set[str] = set()
        with contextlib.suppress(SettingError):  # not there, of another release, or damaged: it is written anew
            plans = load_plans(self._plans, self._rank, model)
        with contextlib.suppress(OSError, ValueError, TypeError):
            failed = {text for text in json.loads(self._failed.read_text()) if isinstance(text, str)}
        return plans, failed

    def save(self, plans: Mapping[Shape, Plan], failed: set[str]) -> None:
        """Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "key.txt").write_text(self._model.replace(" ", "\n") + "\n")
        if plans:
            save_plans(self._plans, self._rank, plans)
        replace_file(self._failed, json.dumps(sorted(failed)[:MOST_FAILED]))
