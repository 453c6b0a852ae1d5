"""``mindspeed-swap selftest`` on the simulated device: it passes, and fails where what it tests is broken."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

BREAK = {
    "waits": """
from mindspeed_swap.core import mover
mover.Mover._wait = lambda self, wait, stream, event: None
""",
    "eviction": """
from mindspeed_swap.core.swap_manager import SwapManager
SwapManager.evict = lambda self, nbytes: 0
""",
    "adam": """
from mindspeed_swap.virtual_optimizer.pipeline import Pipeline
Pipeline._wait = lambda self, wait, stream, event: None
""",
    "capacity": """
import os
os.environ["MINDSPEED_SWAP_DEVICE_CAPACITY"] = "4MiB"
""",
}


def selftest(before: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom mindspeed_swap.cli import main\nraise SystemExit(main(['selftest', '--device', 'sim']))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | settings, capture_output=True, text=True, timeout=300
    )


def test_it_passes():
    done = selftest()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("PASS  ")] == [
        "PASS  bandwidth", "PASS  out of memory", "PASS  small model", "PASS  swapped adam",
    ]  # fmt: skip
    assert lines[0].startswith("mindspeed-swap ") and lines[-1].startswith("PASS: all 4 checks")


@pytest.mark.parametrize(
    ("broken", "check"),
    [("waits", "out of memory"), ("eviction", "out of memory"), ("adam", "swapped adam"), ("capacity", "small model")],
)
def test_it_fails_where_something_is_broken(broken, check):
    done = selftest(BREAK[broken], MINDSPEED_SWAP_SIM_LINK_GBPS="0.2")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and check in failed[0] and "It means: " in done.stdout
    assert "PASS: all" not in done.stdout


def test_a_device_that_is_not_there():
    code = "from mindspeed_swap.cli import main\nraise SystemExit(main(['selftest', '--device', 'npu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "NPU support needs" in done.stderr and "Traceback" not in done.stderr
