"""The tests in ``lane`` need torch_npu on the fake runtime: ``test_lane.py`` runs them, in their own environment."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

collect_ignore = [] if os.environ.get("FAKE_NPU_CAPACITY") else ["lane"]
HERE = Path(__file__).parent
NO_LANE = 3  # exit code of the script where the environment cannot be made


@pytest.fixture(scope="session")
def lane_python() -> str:
    script = HERE.parents[1] / "scripts/ascend_env.sh"
    made = subprocess.run(["bash", script], capture_output=True, text=True, timeout=1500)
    if made.returncode == NO_LANE:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    return made.stdout.split()[-1]


@pytest.fixture(scope="session")
def fake_runtime(lane_python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fake_cann")
    subprocess.run([lane_python, HERE / "fake_runtime.py", folder], check=True, timeout=300)
    return folder
