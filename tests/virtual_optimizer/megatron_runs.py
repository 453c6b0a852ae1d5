"""Real Megatron on the simulated device, by scripts/pretrain_gpt_sim.sh: a process or two, and what they measured."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_python import python

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = {"LAYERS": "2", "HIDDEN": "64", "SEQ": "64", "MBS": "2", "GBS": "4", "ITERS": "4"}
TIMEOUT_SECONDS = 240  # generous: a hang, not a slow machine


@dataclass
class Run:
    code: int
    output: str
    ranks: list[dict[str, Any]]  # what --measure-file wrote, of each rank
    summaries: list[dict[str, Any]]  # of --swap-report-dir

    @property
    def hashes(self) -> list[dict[str, str]]:
        """Of parameters, gradients and optimizer state, main parameters included."""
        return [rank["sha256"] for rank in self.ranks]

    @property
    def lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if "virtual optimizer" in line]

    def static_bytes(self, rank: int = 0) -> int:
        """At the last step's beginning."""
        return int(self.ranks[rank]["steps"][-1]["static_bytes"])


def command(folder: Path, *flags: str) -> list[str]:
    report = ["--swap-report-dir", str(folder / "report")] if "--virtual-optimizer" in flags else []
    script = str(REPOSITORY / "scripts/pretrain_gpt_sim.sh")
    return ["bash", script, *flags, *report, "--measure-file", str(folder / "run{rank}.json")]


def environment(program: str = sys.executable, **extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_SWAP_", "OMP_"))}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "PYTHON": program} | SHAPE | extra


def pretrain(folder: Path, *flags: str, distributed_optimizer: bool = True, **extra: str) -> Run:
    """Trains in ``folder``; ``extra`` is environment: the script's settings. An error ends up in ``code``."""
    folder.mkdir(parents=True, exist_ok=True)
    program = python() if distributed_optimizer else str(_without_flag(folder))
    done = subprocess.run(
        command(folder, *flags), env=environment(program, **extra), capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    count = int(extra.get("NPROC", "1"))
    ranks = [json.loads((folder / f"run{rank}.json").read_text()) for rank in range(count) if done.returncode == 0]
    files = [folder / f"report/rank{rank}/summary.json" for rank in range(count)]
    summaries = [json.loads(file.read_text()) for file in files if file.exists()]
    return Run(done.returncode, done.stdout + done.stderr, ranks, summaries)


def trained(folder: Path, *flags: str, **settings: Any) -> Run:
    run = pretrain(folder, *flags, **settings)
    assert run.code == 0, run.output[-3000:]
    return run


def _without_flag(folder: Path) -> Path:
    """In the place of Python: the script always asks for the distributed optimizer."""
    file = folder / "python.sh"
    file.write_text(
        '#!/bin/bash\nkept=()\nfor a in "$@"; do [ "$a" = --use-distributed-optimizer ] || kept+=("$a"); done\n'
        f'exec {python()} "${{kept[@]}}"\n'
    )
    file.chmod(0o755)
    return file
