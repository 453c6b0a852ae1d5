"""The search for the largest model with a stand-in for the trainer; the real one, tiny, with --full."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"HIDDEN": "64", "FFN": "128", "HEADS": "2", "SEQ": "64", "MBS": "1", "GBS": "2", "VOCAB": "256"}

# FAKE (JSON in the environment): layers that fit by flag, and what is to go wrong.
TRAINER = """
import json, os, sys
from pathlib import Path
fake, args = json.loads(os.environ["FAKE"]), sys.argv[1:]
layers, steps = int(os.environ["LAYERS"]), int(os.environ["ITERS"])
kind = "swap" if "--smart-swap" in args else "recompute" if "--recompute-granularity" in args else "plain"
with open(os.environ["CALLS"], "a") as calls: calls.write(f"{kind} {layers} {steps}\\n")
if layers > fake[kind] - (steps > 12 and fake.get("lucky", 0)):
    print("Traceback", file=sys.stderr)
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB")
losses = [5.0] + [4.0 if layers != fake.get("diverges") else 6.0] * (steps - 1)
Path(args[args.index("--measure-file") + 1]).write_text(json.dumps({"peak_bytes": layers << 20, "steps": [
    {"loss": loss, "seconds": 0.1 * layers} for loss in losses]}))
if kind == "swap":
    assert args[args.index("--swap-host-memory") + 1] == "2.0"
    folder = Path(args[args.index("--swap-report-dir") + 1]) / "rank0"
    folder.mkdir(parents=True, exist_ok=True)
    host = 3 << 30 if layers > fake.get("host_full_above", 99) else 1 << 30
    (folder / "summary.json").write_text(json.dumps({"host": {"peak_used_bytes": host}}))
"""


@pytest.fixture
def largest(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "trainer.sh").write_text(f'exec "$PYTHON" "{tmp_path}/trainer.py" "$@"\n')

    def run(*arguments, trainer=tmp_path / "trainer.sh", extra=None, **fake):
        environment = os.environ | SHAPE | {"PYTHON": sys.executable, "FAKE": json.dumps(fake)} | (extra or {})
        environment["CALLS"] = str(tmp_path / "calls")
        command = ["bash", str(ROOT / "scripts" / "largest_model.sh"), "--out", str(tmp_path / "out")]
        return subprocess.run(
            [*command, "--host-gib", "2", "--trainer", str(trainer), *arguments],
            env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    run.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    run.results = lambda: {row["variant"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())}
    return run


THREE = ("--only", "plain", "--only", "full recompute", "--only", "smart-swap")


def test_it_finds_each_limit_and_compares(largest):
    done = largest(*THREE, plain=5, recompute=9, swap=13)
    assert done.returncode == 0, done.stderr
    found = largest.results()
    assert {name: row["layers"] for name, row in found.items()} == {"plain": 5, "full recompute": 9, "smart-swap": 13}
    assert found["plain"]["steps"] == 24 + 20
    assert found["smart-swap"]["parameters_ratio"] == pytest.approx(
        found["smart-swap"]["parameters"] / found["plain"]["parameters"]
    )
    assert found["smart-swap"]["host_bytes"] == 1 << 30 and found["plain"]["host_bytes"] == 0
    # 0.1 s per layer: without the part outside the layers the speed would be the same
    assert 0.8 < found["smart-swap"]["tflops_ratio"] <= 1
    assert "time left: about" in done.stdout and "plain: 8 layers, 24 steps: torch.OutOfMemoryError" in done.stdout
    assert len(largest.calls()) == 5 + 7 + 7, "doubling, halving, one long run each"


def test_started_again_it_goes_on(largest):
    largest("--only", "plain", plain=5, recompute=9, swap=13)
    before = largest.calls()
    done = largest(*THREE, plain=5, recompute=9, swap=13)
    assert done.returncode == 0 and "5 trials are known" in done.stdout
    after = largest.calls()
    assert after[: len(before)] == before and not any(call.startswith("plain") for call in after[len(before) :])
    other = largest("--host-gib", "3", plain=5, recompute=9, swap=13)
    assert other.returncode == 1 and "other settings" in other.stderr


def test_at_one_size_and_then_the_search_around_it(largest):
    done = largest("--only", "plain", "--at", "5", plain=5, recompute=0, swap=0)
    assert done.returncode == 0 and largest.results()["plain"]["layers"] == 5 and largest.calls() == ["plain 5 44"]
    assert largest("--only", "plain", "--at", "6", plain=5, recompute=0, swap=0).returncode == 1
    largest("--only", "plain", plain=5, recompute=0, swap=0)
    assert largest.results()["plain"]["layers"] == 5
    assert len(largest.calls()) == 2, "what fits larger fits smaller, and the reverse"


def test_the_host_budget_counts(largest):
    largest("--only", "smart-swap", plain=0, recompute=0, swap=20, host_full_above=6)
    assert largest.results()["smart-swap"]["layers"] == 6


def test_the_loss_must_fall(largest):
    done = largest("--only", "plain", "--most", "4", plain=20, recompute=0, swap=0, diverges=4)
    assert largest.results()["plain"]["layers"] == 3
    assert "the loss does not fall: 5.0000 to 6.0000" in done.stdout


def test_a_lucky_trial_is_not_a_limit(largest):
    largest("--only", "plain", plain=6, recompute=0, swap=0, lucky=1)
    assert largest.results()["plain"]["layers"] == 5


def test_nothing_fits(largest):
    done = largest("--only", "plain", plain=0, recompute=0, swap=0)
    assert done.returncode == 1 and largest.results()["plain"]["layers"] == 0 and "none" in done.stdout


def test_unknown_variant(largest):
    done = largest("--only", "magic", plain=1, recompute=1, swap=1)
    assert done.returncode == 2 and "this release has plain, full recompute" in done.stderr


@pytest.mark.full
def test_a_tiny_one_on_the_simulated_device(largest):
    limits = ("--only", "plain", "--only", "smart-swap", "--first", "2", "--most", "6", "--probe-steps", "5")
    extra = {"MINDSPEED_SWAP_DEVICE_CAPACITY": "9MiB", "SEQ": "128", "MBS": "4", "GBS": "4"}
    done = largest(*limits, trainer=ROOT / "scripts" / "pretrain_gpt_sim.sh", extra=extra)
    assert done.returncode == 0, done.stdout + done.stderr
    found = largest.results()
    assert found["smart-swap"]["layers"] > found["plain"]["layers"] >= 1
