"""Real Megatron trains on the simulated device through scripts/pretrain_gpt.py. Slow: each run is a process or two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulated_run import measured

pytestmark = pytest.mark.slow

OOM_LINE = re.compile(
    r"out of memory: tried to allocate \S+ [KM]iB with \S+ [KM]iB of 16\.0 MiB in use "
    r"\(step 1, (forward|backward|optimizer)\)"
)


def losses(report: dict) -> list[float]:
    return [step["loss"] for step in report["steps"]]


@pytest.fixture(scope="module")
def one_rank(pretrain, tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("one") / "run.json"
    done = pretrain("--measure-file", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/" in done.stdout
    return measured(file)


def test_it_learns(one_rank: dict) -> None:
    assert one_rank["iterations"] == 3
    assert losses(one_rank)[2] < losses(one_rank)[1] < losses(one_rank)[0] < 6


def test_memory_of_a_step(one_rank: dict) -> None:
    first, second, third = one_rank["steps"]
    assert second["static_bytes"] > first["static_bytes"]  # the first step makes the optimizer's state
    assert second["static_bytes"] == third["static_bytes"]
    # gloo's thread lets go of the tensor of a finished collective a moment late
    assert second["held_bytes"] == pytest.approx(third["held_bytes"], abs=8192)
    assert third["held_bytes"] > 100_000
    assert third["peak_bytes"] >= third["static_bytes"] + third["held_bytes"] - 8192
    assert one_rank["peak_bytes"] == max(step["peak_bytes"] for step in one_rank["steps"])


def test_same_bits_with_loader_processes(one_rank: dict, pretrain, tmp_path: Path) -> None:
    done = pretrain("--num-workers", "2", "--measure-file", str(tmp_path / "run.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    again = measured(tmp_path / "run.json")
    assert again["sha256"] == one_rank["sha256"]
    assert losses(again) == losses(one_rank)
    assert len(set(again["sha256"].values())) == 3


def test_tensor_and_sequence_parallel(pretrain, tmp_path: Path) -> None:
    reports = []
    for name, flags in {"tp": (), "sp": ("--sequence-parallel",)}.items():
        done = pretrain(*flags, "--measure-file", f"{tmp_path}/{name}.{{rank}}.json", NPROC="2", TP="2")
        assert done.returncode == 0, done.stderr[-3000:]
        reports.append([measured(tmp_path / f"{name}.{rank}.json") for rank in (0, 1)])
    (tensor, tensor_1), (sequence, _) = reports
    assert losses(tensor) == losses(tensor_1)
    assert losses(sequence) == pytest.approx(losses(tensor), abs=2e-3)
    assert sequence["steps"][2]["held_bytes"] < tensor["steps"][2]["held_bytes"]


def test_out_of_memory_is_one_line(pretrain) -> None:
    done = pretrain(SEQ="256", MBS="8", GBS="8", MINDSPEED_SWAP_DEVICE_CAPACITY="16MiB")
    assert done.returncode == 1
    assert OOM_LINE.fullmatch(done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_out_of_memory_ends_every_rank(pretrain) -> None:
    done = pretrain(SEQ="256", MBS="8", GBS="16", NPROC="2", PP="2", MINDSPEED_SWAP_DEVICE_CAPACITY="16MiB")
    assert done.returncode == 1
    assert any(OOM_LINE.fullmatch(line) for line in done.stderr.splitlines())
    assert "Traceback" not in done.stderr


def test_unknown_flag(pretrain) -> None:
    done = pretrain("--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr.splitlines()[-1]
