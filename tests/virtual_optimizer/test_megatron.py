"""Real Megatron with ``--virtual-optimizer`` ends with the bits of the run without, and with less device memory."""
from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from megatron_runs import TIMEOUT_SECONDS, command, environment, pretrain, trained
from warm_python import python

pytest.importorskip("megatron.training")

SAVE = ("--save-interval", "2", "--exit-interval", "2")
TWO_STAGES = {"NPROC": "2", "PP": "2"}
TWO_COPIES = {"NPROC": "2"}
SAVE_SECONDS = 0.15  # of this size, from its folder's birth to the tracker file
NO_HOOK = {"MINDSPEED_SWAP_OOM_HOOK": "0"}  # nothing overlaps: at the end of a step all has left
NOISE = 16 << 10  # gloo lets go of the tensor of a finished collective a moment late


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(folder):
    return trained(folder / "plain")


@pytest.mark.parametrize("flags", ["", "--virtual-optimizer-mode mapped --virtual-optimizer-master"])
def test_one_rank(plain, folder, flags):
    run = trained(folder / f"one{len(flags)}", "--virtual-optimizer", "all", *flags.split())
    figures = run.summaries[0]["virtual_optimizer"]
    assert run.hashes == plain.hashes
    assert figures["mode"] == ("mapped" if flags else "streamed")
    assert bool(figures["master_bytes"]) == bool(flags)
    moved = figures["moments_bytes"] + figures["master_bytes"]
    assert run.summaries[0]["host"]["peak_used_bytes"] >= moved
    assert len(run.lines) == 1 and run.lines[0].endswith(", stage 0 of 1")
    if flags:
        assert plain.static_bytes() - run.static_bytes() == pytest.approx(moved, abs=NOISE)
        assert figures["came_early_bytes"] == figures["left_late_bytes"] == 0
    else:
        assert figures["came_early_bytes"] > 0.5 * moved
        assert 0 < figures["left_late_bytes"] <= moved  # in the next forward
        # The optimizer's own peak is lower too.
        peaks = [each.ranks[0]["steps"][-1]["peak_bytes"] for each in (plain, run)]
        assert peaks[0] - peaks[1] > 0.7 * moved


def test_without_the_allocators_hook_nothing_overlaps(plain, folder):
    """Nobody would tell when an allocation fails."""
    run = trained(folder / "no-hook", "--virtual-optimizer", "all", **NO_HOOK)
    figures = run.summaries[0]["virtual_optimizer"]
    assert run.hashes == plain.hashes
    assert figures["came_early_bytes"] == figures["left_late_bytes"] == 0
    assert plain.static_bytes() - run.static_bytes() == pytest.approx(figures["moments_bytes"], abs=NOISE)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_case_21_resume_in_a_new_process(plain, folder, form):
    """Case 21: saved after step 2 and loaded in a new process, steps 3 and 4 are as if nothing had been."""
    checkpoint = ("--ckpt-format", form)
    saved = folder / f"saved-{form}"
    trained(folder / f"first-{form}", "--virtual-optimizer", "all", *checkpoint, "--save", str(saved), *SAVE)
    run = trained(folder / f"second-{form}", "--virtual-optimizer", "all", *checkpoint, "--load", str(saved))
    assert run.ranks[0]["iterations"] == 2
    assert run.hashes == plain.hashes
    assert any("shared one step count" in line for line in run.lines)


@pytest.mark.parametrize("moment", [0.3, *(pytest.param(m / 10, marks=pytest.mark.full) for m in range(10) if m != 3)])
def test_killed_while_it_saves(plain, folder, moment):
    """SIGKILL somewhere in the save after step 2: what is there loads, and ends as if nothing had been."""
    name = f"killed-{moment}"
    saved, flags = folder / name, ("--virtual-optimizer", "all", "--ckpt-format", "torch_dist")
    save = ("--save", str(saved), "--save-interval", "1")
    (folder / f"first-{name}").mkdir()
    process = subprocess.Popen(
        command(folder / f"first-{name}", *flags, *save), env=environment(python()), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (saved / "iter_0000002").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(moment * SAVE_SECONDS)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run = trained(folder / f"second-{name}", *flags, "--load", str(saved))
    assert run.ranks[0]["iterations"] <= 3  # of 4: what was there before the save, or what a quick machine saved after
    if run.ranks[0]["iterations"]:  # else there are no gradients to compare
        assert run.hashes == plain.hashes


def test_stages_with_amounts_of_their_own(folder):
    amount = 0.0003  # GB: 322122 bytes
    flags = "--virtual-optimizer", str(amount), "0"
    overlapped = trained(folder / "stages-overlapped", *flags, **TWO_STAGES)
    run = trained(folder / "stages", *flags, **TWO_STAGES, **NO_HOOK)
    plain = trained(folder / "stages-plain", **TWO_STAGES)
    assert run.hashes == overlapped.hashes == plain.hashes
    first, second = (summary["virtual_optimizer"] for summary in run.summaries)
    assert 0 < first["moments_bytes"] <= first["amount_bytes"] == 322122
    assert second["moments_bytes"] == 0
    assert plain.static_bytes(0) - run.static_bytes(0) == pytest.approx(first["moments_bytes"], abs=NOISE)
    assert plain.static_bytes(1) - run.static_bytes(1) == pytest.approx(0, abs=NOISE)
    assert sorted(line.rpartition(", ")[2] for line in run.lines) == ["stage 0 of 2", "stage 1 of 2"]


@pytest.mark.full
def test_data_parallel_shards(folder):
    overlapped = trained(folder / "shards-overlapped", "--virtual-optimizer", "all", **TWO_COPIES)
    run = trained(folder / "shards", "--virtual-optimizer", "all", **TWO_COPIES, **NO_HOOK)
    plain = trained(folder / "shards-plain", **TWO_COPIES)
    assert run.hashes == overlapped.hashes == plain.hashes
    for rank in (0, 1):
        moved = run.summaries[rank]["virtual_optimizer"]["moments_bytes"]
        assert plain.static_bytes(rank) - run.static_bytes(rank) == pytest.approx(moved, abs=NOISE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--virtual-optimizer 1 2 3", "--virtual-optimizer: 3 values for 1 pipeline stage; give 1"),
        ("--virtual-optimizer all --swap-host-memory 0.0005", "--virtual-optimizer all: the optimizer state of stage"),
    ],
)
def test_errors_before_training(folder, flags, message):
    run = pretrain(folder / "refused", *flags.split())
    assert run.code != 0
    assert message in run.output
    assert "iteration        1/" not in run.output


# ---- the whole matrix
@pytest.mark.full
@pytest.mark.parametrize("saves", ["plain", "virtual"])
@pytest.mark.parametrize("amount", ["all", "0.0003"])
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_resume_of_either(plain, folder, form, amount, saves):
    """A checkpoint written without the flag is loaded with it; a part moves, or all. (Plain Megatron loads neither.)"""
    name = f"{form}-{amount}-{saves}"
    flags = () if saves == "plain" else ("--virtual-optimizer", amount)
    checkpoint = ("--ckpt-format", form)
    trained(folder / f"first-{name}", *flags, *checkpoint, "--save", str(folder / name), *SAVE)
    run = trained(folder / f"second-{name}", "--virtual-optimizer", amount, *checkpoint, "--load", str(folder / name))
    assert run.hashes == plain.hashes


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("layout", ["stages", "shards", "tensor"])
def test_resume_of_two_ranks(folder, layout, form):
    ranks = {"stages": TWO_STAGES, "shards": TWO_COPIES, "tensor": {"NPROC": "2", "TP": "2"}}[layout]
    flags = ("--virtual-optimizer", "0.0003", "--ckpt-format", form)
    name = f"{layout}-{form}"
    straight = trained(folder / f"straight-{name}", **ranks)
    trained(folder / f"first-{name}", *flags, "--save", str(folder / name), *SAVE, **ranks)
    run = trained(folder / f"second-{name}", *flags, "--load", str(folder / name), **ranks)
    assert run.hashes == straight.hashes


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"NPROC": "1"}, TWO_COPIES, {"NPROC": "2", "TP": "2"}])
def test_resharding(folder, layout):
    """Written by two ranks of tensor parallel, loaded by other layouts. (Plain Megatron cannot, to compare with.)"""
    form = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
    name = "-".join(f"{key}{value}" for key, value in layout.items())
    source = {"NPROC": "2", "TP": "2"}
    trained(folder / f"a-{name}", "--virtual-optimizer", "all", *form, "--save", str(folder / name), *SAVE, **source)
    loads = [
        trained(folder / f"{mode}-{name}", "--virtual-optimizer", amount, "--virtual-optimizer-mode", mode, *form,
                "--load", str(folder / name), **layout)
        for mode, amount in (("mapped", "all"), ("streamed", "all"), ("streamed", "0.0001"))
    ]  # fmt: skip
    assert loads[0].hashes == loads[1].hashes == loads[2].hashes
    losses = [step["loss"] for step in loads[0].ranks[-1]["steps"]]
    straight = trained(folder / f"straight-{name}", **source)
    assert losses == pytest.approx([step["loss"] for step in straight.ranks[-1]["steps"][2:]], abs=5e-3)


@pytest.mark.full
@pytest.mark.parametrize("master", [(), ("--virtual-optimizer-master",)])
@pytest.mark.parametrize("mode", ["mapped", "streamed"])
def test_without_the_distributed_optimizer(folder, mode, master):
    name = f"{mode}{len(master)}"
    flags = ("--virtual-optimizer", "all", "--virtual-optimizer-mode", mode, *master, "--ckpt-format", "torch_dist")
    settings = {"distributed_optimizer": False}
    plain = trained(folder / f"replicated-{name}", **settings)
    run = trained(folder / f"replicated-virtual-{name}", *flags, **settings)
    assert run.hashes == plain.hashes
    trained(folder / f"first-{name}", *flags, "--save", str(folder / f"r{name}"), *SAVE, **settings)
    second = trained(folder / f"second-{name}", *flags, "--load", str(folder / f"r{name}"), **settings)
    assert second.hashes == run.hashes


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    ["--overlap-grad-reduce --overlap-param-gather", "--virtual-optimizer-master",
     "--async-save --ckpt-format torch_dist", "--smart-swap"],
)  # fmt: skip
def test_with(folder, flags):
    words = tuple(flags.split())
    name = "with" + words[0].strip("-")
    saving = ("--save", str(folder / f"{name}-saved"), "--save-interval", "2") if "--async-save" in words else ()
    ours = tuple(word for word in words if word.startswith(("--virtual", "--smart")))
    plain = trained(folder / f"{name}-plain", *(word for word in words if word not in ours), *saving, **TWO_COPIES)
    run = trained(folder / name, "--virtual-optimizer", "all", *words, *saving, **TWO_COPIES)
    assert run.hashes == plain.hashes


@pytest.mark.full
def test_four_stages(folder):
    """``6 4 2 0``, scaled down."""
    layout = {"NPROC": "4", "PP": "4", "LAYERS": "4", "GBS": "8"}
    flags = "--virtual-optimizer", "0.0003", "0.0002", "0.0001", "0"
    overlapped = trained(folder / "four-overlapped", *flags, **layout)
    run = trained(folder / "four", *flags, **layout, **NO_HOOK)
    plain = trained(folder / "four-plain", **layout)
    assert run.hashes == overlapped.hashes == plain.hashes
    for rank, summary in enumerate(run.summaries):
        figures = summary["virtual_optimizer"]
        assert figures["stage"] == f"stage {rank} of 4"
        assert figures["moments_bytes"] <= figures["amount_bytes"]
        assert plain.static_bytes(rank) - run.static_bytes(rank) == pytest.approx(figures["moments_bytes"], abs=NOISE)
