"""Real Megatron on the simulated device: targets, plan files, policies. Every run is a process."""
from __future__ import annotations

import functools
import json

import pytest
from layout_runs import Trainer
from layouts import LAYOUTS
from trained import gib, stable_peak, stable_steps

pytest.importorskip("megatron.training")

ONE = LAYOUTS["one"]
LEVELS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]


@functools.cache
def reachable(trainer: Trainer) -> int:
    run = trainer.train(ONE, ONE.dtype, "--smart-swap", "--swap-memory-target", "0", ITERS="4")
    return run.summaries[0]["floor"]["reachable_bytes"]


def test_a_target_with_room_to_spare_and_its_plan_as_a_file(trainer, tmp_path):
    plain = trainer.plain(ONE, ONE.dtype)
    target = 0.7 * plain.peaks()[0]
    plan = tmp_path / "plan.{rank}.json"
    found = trainer.train(
        ONE, ONE.dtype, "--smart-swap", "--swap-memory-target", gib(target), "--swap-plan-save", str(plan)
    )
    assert found.digests() == plain.digests()
    assert stable_peak(found) <= target
    assert "smart-swap: moves what a step needs above" in found.output
    tries = found.summaries[0]["tries"]
    assert all(t["predicted_peak_bytes"] <= target and t["predicted_step_ms"] > 0 for t in tries)
    assert abs(tries[0]["predicted_peak_bytes"] - tries[0]["peak_bytes"]) <= 0.02 * tries[0]["peak_bytes"]
    assert found.summaries[0]["warm_up"]["candidate_bytes"] > 0

    again = trainer.train(ONE, ONE.dtype, "--smart-swap", "--swap-plan", str(plan))
    assert again.digests() == plain.digests()
    assert again.summaries[0]["tries"] == []
    steps = again.measured[0]["steps"][1:]  # the first one measures the link too
    assert max(step["peak_bytes"] for step in steps) <= target

    done, _ = trainer.start(ONE, ONE.dtype, "--smart-swap", "--swap-plan", str(plan), SEQ="64")
    assert done.returncode != 0
    assert "was made for seq_length=128, this run has seq_length=64" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
def test_targets(trainer, level):
    """At 1.02 x the floor and above it trains, measured peak within the target, same bits. Below: one error."""
    plain = trainer.plain(ONE, ONE.dtype)
    target = level * plain.peaks()[0]
    flags = ("--smart-swap", "--swap-memory-target", gib(target))
    floor = reachable(trainer)
    if target < floor:
        done, _ = trainer.start(ONE, ONE.dtype, *flags)
        assert done.returncode != 0
        assert "infeasible: the floor is" in done.stderr and "reached in phase" in done.stderr
        return
    assert target >= 1.02 * floor, "between the two nothing is promised: take other levels"
    run = trainer.train(ONE, ONE.dtype, *flags, ITERS="14")
    assert run.digests() == plain_of(trainer, 14).digests()
    assert stable_peak(run) <= target


@functools.cache
def plain_of(trainer: Trainer, steps: int):
    return trainer.train(ONE, ONE.dtype, ITERS=str(steps))


@pytest.mark.full
def test_trains_at_1_02_of_the_floor_below_it_one_error_with_floor_and_phase(trainer):
    floor = reachable(trainer)
    run = trainer.train(ONE, ONE.dtype, "--smart-swap", "--swap-memory-target", gib(1.02 * floor))
    assert run.digests() == trainer.plain(ONE, ONE.dtype).digests()
    assert stable_peak(run) <= 1.02 * floor
    done, _ = trainer.start(ONE, ONE.dtype, "--smart-swap", "--swap-memory-target", gib(0.98 * floor))
    assert done.returncode != 0
    assert "infeasible: the floor is" in done.stderr and "reached in phase" in done.stderr


def at_a_target(trainer, layout, share):
    """One target for all ranks, below what the least of them needs: the run, which has plain's bits, and the target."""
    plain = trainer.plain(layout, layout.dtype)
    target = share * min(plain.peaks())
    run = trainer.train(layout, layout.dtype, "--smart-swap", "--swap-memory-target", gib(target))
    assert run.digests() == plain.digests()
    return run, target


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp", "dp", "pp", "ep"])
def test_ranks_that_run_the_same_layers_follow_one_plan(trainer, name):
    run, _ = at_a_target(trainer, LAYOUTS[name], 0.75)
    plans = [(s["plan"]["swap_bytes"], s["plan"]["tensors"], len(s["tries"])) for s in run.summaries]
    assert (plans[0] == plans[1]) == (name != "pp"), plans
    if name == "pp":
        assert "rank 1] smart-swap: WarmUp -> SearchPolicy" in run.output


@pytest.mark.full
@pytest.mark.parametrize("name", ["vpp_one_layer", "vpp_two_layers", "ep"])
def test_chunks_of_a_pipeline_and_experts_within_a_target(trainer, name):
    run, target = at_a_target(trainer, LAYOUTS[name], 0.8)
    for rank in range(LAYOUTS[name].ranks):
        assert run.summaries[rank]["phase"] == "Stable" and len(stable_steps(run, rank)) >= 2
        assert stable_peak(run, rank) <= target


@pytest.mark.full
def test_better_memory_saving_moves_the_optimizer_state_too(trainer, tmp_path):
    policy = tmp_path / "policy.py"
    policy.write_text("self.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING\n")
    plain = trainer.plain(ONE, ONE.dtype)
    flags = "--smart-swap", "--swap-policy-config", str(policy)
    run = trainer.train(ONE, ONE.dtype, *flags)
    assert {k: v for k, v in run.digests()[0].items() if k != "optimizer"} == {
        k: v for k, v in plain.digests()[0].items() if k != "optimizer"
    }
    virtual = run.summaries[0]["virtual_optimizer"]
    assert virtual["mode"] == "streamed", json.dumps(virtual)
    # Without the hook nothing overlaps: all has left when a step ends.
    steps = trainer.train(ONE, ONE.dtype, *flags, MINDSPEED_SWAP_OOM_HOOK="0").measured[0]["steps"]
    assert steps[-1]["static_bytes"] < plain.measured[0]["steps"][-1]["static_bytes"]
    done, _ = trainer.start(ONE, ONE.dtype, *flags, "--virtual-optimizer", "all")
    assert done.returncode != 0
    assert "BETTER_MEMORY_SAVING and --virtual-optimizer both move" in done.stderr


@pytest.mark.full
def test_host_budget_too_small_for_the_device_is_an_error_with_the_figure(trainer):
    target = 0.7 * trainer.plain(ONE, ONE.dtype).peaks()[0]
    done, _ = trainer.start(
        ONE, ONE.dtype, "--smart-swap", "--swap-memory-target", gib(target), "--swap-host-memory", "0.003"
    )
    assert done.returncode != 0
    assert "of host memory and" in done.stderr and "--swap-host-memory" in done.stderr


@pytest.mark.full
def test_settings_of_a_feature_that_is_off(trainer):
    done, _ = trainer.start(ONE, ONE.dtype, "--swap-memory-target", "1")
    assert done.returncode != 0
    assert (
        "--swap-memory-target is a setting of --smart-swap and --adaptive-memory-optimization, which are off: "
        "add --smart-swap or --adaptive-memory-optimization" in done.stderr
    )
