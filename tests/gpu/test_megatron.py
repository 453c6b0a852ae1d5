"""Real Megatron on GPUs: with the device capped, a deterministic run ends with the bits of the uncapped one.

One process per rank, through scripts/pretrain_gpt_gpu.sh. Figures are printed: run with ``-s`` to see them. Several
tests may share the GPUs (``-n 3``): nothing here is about time.
"""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_device import GPUS, needs_gpu

from mindspeed_swap.units import MIB

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not TE, reason="Transformer Engine is not installed")
needs_two = pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt_gpu.sh"
SMALL = {"LAYERS": "8", "HIDDEN": "2048", "FFN": "5504", "HEADS": "16", "SEQ": "8192", "ITERS": "12"}
TE_LAYERS = {"IMPL": "transformer_engine", "SDPA": "1"}
TWO = SMALL | {"NPROC": "2"}
VPP = ("--num-layers-per-virtual-pipeline-stage", "2")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
SECONDS = 300


def train(folder: Path, name: str, settings: dict, flags=(), capacity_bytes: int | None = None) -> list[dict]:
    """What each rank measured."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINDSPEED_SWAP_")}
    environment |= {"PYTHON": sys.executable, "DETERMINISTIC": "1"} | settings
    if capacity_bytes is not None:
        environment["MINDSPEED_SWAP_DEVICE_CAPACITY"] = str(capacity_bytes)
    command = ["bash", str(SCRIPT), *flags, "--measure-file", f"{folder}/{name}.{{rank}}.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads((folder / f"{name}.{n}.json").read_text()) for n in range(int(settings.get("NPROC", "1")))]


def peak(runs: list[dict]) -> int:
    return max(run["peak_bytes"] for run in runs)


def show(name: str, runs: list[dict]) -> None:
    for rank, run in enumerate(runs):
        last = run["steps"][-1]
        print(f"{name} rank {rank}: peak {run['peak_bytes'] / MIB:.0f} MiB, held {last['held_bytes'] / MIB:.0f} MiB, "
              f"{1000 * last['seconds']:.0f} ms")  # fmt: skip


def check(folder: Path, settings: dict, flags: tuple, features: dict[str, tuple]) -> None:
    """``features``: flags -> (share of the plain peak, most of plain's held bytes that may stay)"""
    plain = train(folder, "plain", settings, flags)
    show("\nplain", plain)
    for number, (feature, (share, most_held)) in enumerate(features.items()):
        capacity = int(share * peak(plain))
        swapped = train(folder, f"swapped{number}", settings, (*flags, *feature.split()), capacity)
        show(feature, swapped)
        for ours, theirs in zip(swapped, plain, strict=True):
            assert ours["sha256"] == theirs["sha256"]
            assert ours["peak_bytes"] <= capacity
            if theirs["peak_bytes"] > capacity:  # stages of a pipeline need more or less
                assert ours["steps"][-1]["held_bytes"] <= most_held * theirs["steps"][-1]["held_bytes"]
            print(f"{feature}: equal bits under a capacity of {capacity / MIB:.0f} MiB")


def test_plain_is_deterministic_and_swapped_is_equal(tmp_path):
    again = train(tmp_path, "again", SMALL)
    features = {"--smart-swap": (0.8, 0.75), "--adaptive-memory-optimization": (0.75, 0.75)}
    check(tmp_path, SMALL, (), features)
    assert again[0]["sha256"] == json.loads((tmp_path / "plain.0.json").read_text())["sha256"]


@needs_te
@pytest.mark.parametrize(
    ("feature", "share", "most_held"),
    [
        ("--smart-swap", 0.9, 0.9),
        ("--adaptive-memory-optimization", 0.9, 0.9),
        ("--swap-config FILE", 1.0, 1.0),
        ("--virtual-optimizer all", 1.0, 1.0),
        ("--adaptive-memory-optimization --virtual-optimizer all", 0.7, 1.0),
    ],
    ids=["smart-swap", "adaptive", "swap-config", "virtual-optimizer", "both"],
)
def test_transformer_engine(tmp_path, feature, share, most_held):
    """Its layers and, as Megatron takes it where it is installed, its FusedAdam."""
    configuration = tmp_path / "swap.yaml"
    configuration.write_text("swap_config:\n  swap: True\n  default_prefetch: 10\n")
    check(tmp_path, SMALL | TE_LAYERS, (), {feature.replace("FILE", str(configuration)): (share, most_held)})


EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 704 "
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss"
)  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "layer"])
def test_experts_run_again_with_the_same_bits(tmp_path, name):
    few, flags = {**SMALL, "LAYERS": "3", "HIDDEN": "1024", "HEADS": "8", "SEQ": "4096"}, tuple(EXPERTS.split())
    adaptive = (*flags, "--adaptive-memory-optimization")
    file = tmp_path / "plan.json"
    train(tmp_path, "searched", few | {"ITERS": "60"}, (*adaptive, "--swap-plan-save", str(file)))
    saved = json.loads(file.read_text())
    (plan,) = saved["plans"].values()
    plan["recomputes"] = [{"key": [0, 0, layer, name], "nbytes": 1, "forward_ms": 1.0} for layer in (1, 2, 3)]
    saved["plans"] = dict.fromkeys(saved["plans"], plan)
    file.write_text(json.dumps(saved))
    (plain,) = train(tmp_path, "plain", few, flags)
    (again,) = train(tmp_path, "again", few, (*adaptive, "--swap-plan", str(file)))
    assert again["sha256"] == plain["sha256"]
    assert [step["loss"] for step in again["steps"]] == [step["loss"] for step in plain["steps"]]
    assert again["steps"][-1]["held_bytes"] < 0.8 * plain["steps"][-1]["held_bytes"]


@needs_two
@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        pytest.param({"TP": "2"}, (), id="tp"),
        # Without apex and Transformer Engine Megatron has no norm for sequence parallel.
        pytest.param({"TP": "2"} | TE_LAYERS, ("--sequence-parallel",), id="tp_sp", marks=needs_te),
        pytest.param({"PP": "2", "GBS": "4"}, VPP, id="pp_vpp"),
        pytest.param({"GBS": "2"}, OVERLAP, id="dp_overlap"),
    ],
)
def test_two_gpus(tmp_path, settings, flags):
    check(tmp_path, TWO | settings, flags, {"--smart-swap": (0.85, 0.9)})


def test_a_hundred_steps_are_flat(tmp_path):
    """Bytes reserved on the device and resident on the host (page-locked ones are) stop growing."""
    few = SMALL | {"LAYERS": "4", "SEQ": "4096"}
    plain = train(tmp_path, "few", few)
    (run,) = train(tmp_path, "many", few | {"ITERS": "100"}, ("--smart-swap",), int(0.85 * peak(plain)))
    reserved = [max(phase["reserved_bytes"] for phase in step["phases"].values()) for step in run["steps"]]
    resident = [step["resident_bytes"] for step in run["steps"]]
    for name, values in (("reserved", reserved), ("resident", resident)):
        print(f"\n{name} MiB at steps 3, 10, 20, 50, 100: {[values[n - 1] // MIB for n in (3, 10, 20, 50, 100)]}")
    assert max(reserved[20:]) <= max(reserved[:20])
    assert resident[-1] - resident[20] < 16 * MIB
