"""scripts/pretrain_llama2_swap_config.sh: a documented case from the command to its grep."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_llama2_swap_config.sh"
SMALL = {"HIDDEN": "64", "FFN": "128", "SEQ": "128", "MBS": "8", "GBS": "8", "ITERS": "3", "DATA": "mock"}


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Where a GPU is, a small model trains on it as well.
    environment = kept | SMALL | {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_from_the_command_to_the_grep(tmp_path):
    pytest.importorskip("megatron.training")
    done = start(tmp_path, str(ROOT / "configs" / "swap_config" / "case2_layers.yaml"))
    assert done.returncode == 0, done.stderr[-3000:]
    grep = ["grep", "Set layer swap at", "output/msrun/worker_0.log"]
    printed = subprocess.run(grep, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed == (ROOT / "tests" / "fine_grained" / "expected" / "case2_layers.txt").read_text()


def test_without_a_file_it_says_what_it_wants(tmp_path):
    done = start(tmp_path, "--train-iters", "3")
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and "configs/swap_config" in done.stderr
