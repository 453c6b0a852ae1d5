"""The redirect cannot be undone: everything that needs it runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_run import SCRIPTS, TIMEOUT_SECONDS, environment

Run = Callable[..., subprocess.CompletedProcess]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts training processes")


@pytest.fixture(scope="session")
def run_python() -> Run:
    """Run Python in a new process: a file, or code."""

    def run(code: str | Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *([str(code)] if isinstance(code, Path) else ["-c", code]), *arguments]
        return subprocess.run(
            command, env=environment(**extra), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )

    return run


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small byte-level dataset."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    source = prefix.with_suffix(".txt")
    source.write_text("the quick brown fox jumps over the lazy dog; " * 2000)
    command = [sys.executable, str(SCRIPTS / "prepare_text.py"), str(source), "--output", str(prefix)]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return prefix


@pytest.fixture(scope="session")
def pretrain(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run scripts/pretrain_gpt_sim.sh with a model that takes a moment; ``extra`` is its environment."""

    def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess:
        shape = {
            "LAYERS": "4",
            "HIDDEN": "64",
            "SEQ": "64",
            "MBS": "2",
            "GBS": "4",
            "ITERS": "3",
            "DATA": str(small_text),
        }
        command = ["bash", str(SCRIPTS / "pretrain_gpt_sim.sh"), *arguments]
        return subprocess.run(
            command,
            env=environment(**(shape | extra)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    return run
