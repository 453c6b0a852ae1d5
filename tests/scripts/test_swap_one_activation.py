"""scripts/swap_one_activation.py on the simulated device, the variants that must fail included."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--layers", "3", "--hidden", "64", "--tokens", "128")
# Long enough that a copy whose thread waits for a core is still in time.
ROOMY = ("--layers", "4", "--hidden", "128", "--tokens", "1024")
ATTEMPTS = 3


@pytest.fixture
def swap_one(tmp_path):
    def run(*arguments, model=SMALL):
        environment = dict(os.environ, MINDSPEED_SWAP_DEVICE="sim", PYTHONWARNINGS="ignore")
        environment.pop("MINDSPEED_SWAP_DEVICE_CAPACITY", None)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, str(ROOT / "scripts" / "swap_one_activation.py"), *model, "--out", str(tmp_path)]
        return subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    return run


def in_time(swap_one, *arguments):
    """The copies are real and so are their times: on a machine without a free core they can be late."""
    for _ in range(ATTEMPTS):
        done = swap_one(*arguments, model=ROOMY)
        if "is not over when" not in done.stdout:
            break
    return done


def life(text):
    """name -> ms"""
    return {name: float(at) for at, name in re.findall(r"^ +([\d.]+) ms  (.+)$", text, re.MULTILINE)}


def hashes(text):
    return re.findall(r"([0-9a-f]{16}) +([0-9a-f]{16})$", text, re.MULTILINE)


def test_one_tensor_leaves_and_is_back_in_time(swap_one, tmp_path):
    done = in_time(swap_one, "--layer", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    at = life(done.stdout)
    order = ["saved by forward", "D2H copy starts", "D2H copy ends", "device memory given up", "H2D copy starts",
             "H2D copy ends", "first use in backward"]  # fmt: skip
    assert [at[name] for name in order] == sorted(at[name] for name in order)
    assert at["last use in forward over by"] <= at["device memory given up"]
    found = hashes(done.stdout)
    assert len(found) == 3 and len(set(found)) == 1
    streams = re.search(r"streams: compute (\S+), D2H (\S+), H2D (\S+)", done.stdout)
    assert len({streams[1], streams[2], streams[3]}) == 3

    (key,) = set(re.findall(r"(microbatch 0, layer 2, tensor \d+)", done.stdout))
    profiled = json.loads((tmp_path / "profiler.json").read_text())["traceEvents"]
    for what in ("copy to host of", "copy to device of"):
        name = f"mindspeed_swap: {what} {key}"
        assert repr(name) in done.stdout
        assert sum(event.get("name") == name and event["ph"] == "X" for event in profiled) == 1
    ours = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in ours if event.get("cat") in ("D2H", "H2D")} == {f"D2H {key}", f"H2D {key}"}


def test_before_in_line_with_compute(swap_one):
    done = in_time(swap_one, "--same-stream")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in line with compute" in done.stdout
    streams = re.search(r"streams: compute (\S+), D2H (\S+), H2D (\S+)", done.stdout)
    assert streams[1] == streams[2] == streams[3]


def test_a_late_prefetch_fails(swap_one):
    done = swap_one("--late-prefetch")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    # (On a busy machine the copy out may be late as well.)
    assert "FAILED the H2D copy is not over when backward first uses the tensor: compute waits for it" in failed
    assert len(set(hashes(done.stdout))) == 1, "late is slow, never wrong"


def test_what_can_be_chosen_and_what_cannot(swap_one):
    listed = swap_one("--list")
    assert listed.returncode == 0 and "--layer 3 --site" in listed.stdout
    stays = re.search(r"--layer (\d+) --site (\d+) .*stays: (.*)", listed.stdout)
    done = swap_one("--layer", stays[1], "--site", stays[2])
    assert done.returncode == 2 and f"cannot be moved: {stays[3]}" in done.stderr
    done = swap_one("--layer", "9")
    assert done.returncode == 2 and "layer 9" in done.stderr and "--list" in done.stderr
