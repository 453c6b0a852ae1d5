"""Paths, environment and results of the processes that these tests start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
TIMEOUT_SECONDS = 240  # generous: a hang, not a slow machine


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what would steer a simulated run, plus ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_SWAP_", "OMP_"))}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "PYTHON": sys.executable} | extra


def measured(path: Path) -> dict[str, Any]:
    """What --measure-file wrote."""
    return json.loads(path.read_text())
