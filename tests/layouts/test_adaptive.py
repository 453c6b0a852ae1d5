"""--adaptive-memory-optimization in the layouts, on a slow link: keep, swap and recompute in one plan, equal bits."""
from __future__ import annotations

import json

import pytest
from layout_runs import ADAPTIVE, SLOW_LINK_GBPS, Run, Trainer, faults
from layouts import LAYOUTS

# Run by default; the others take too long for every run: --full.
DEFAULT = ("one", "dropout_only")
# It decides what to recompute itself.
NAMES = [name for name, layout in LAYOUTS.items() if "--recompute-granularity" not in layout.flags]
# Recompute may take from outside the forward's end: what is held then says less than it does of swap.
LEAST_HELD_SAVED = 0.15

pytest.importorskip("megatron.training")


def recomputed(run: Run) -> bool:
    return any(" -> Stable" in line and "recompute" in line for line in run.output.splitlines())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.full) for n in NAMES])
def test_capped_with_the_same_bits(trainer: Trainer, name: str) -> None:
    """Between floor and peak: sha256 of parameters, gradients, optimizer state; peak within the cap; Stable."""
    layout = LAYOUTS[name]
    plain, ours = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype, ADAPTIVE)
    found = faults(trainer, layout, layout.dtype, plain, ours, LEAST_HELD_SAVED)
    if name not in DEFAULT:  # a search may take more than these few steps, with several shapes above all
        found = [fault for fault in found if "phase" not in fault]
    assert found == []
    if name in DEFAULT:
        assert recomputed(ours)


@pytest.mark.full
def test_ten_budgets(trainer: Trainer) -> None:
    """From the plain peak down to 1.02 x the floor: trains, the same bits, the measured peak within the budget."""
    layout = LAYOUTS["one"]
    plain = trainer.plain(layout, layout.dtype)
    straight = trainer.train(layout, layout.dtype, ITERS="20")
    (peak,) = plain.peaks()
    floor = 2 * trainer.caps(layout, layout.dtype)[0] - peak
    for number in range(10):
        budget = int(1.02 * floor + (peak - 1.02 * floor) * (9 - number) / 9)
        run = trainer.train(
            layout, layout.dtype, ADAPTIVE, caps=[budget], ITERS="20", MINDSPEED_SWAP_SIM_LINK_GBPS=SLOW_LINK_GBPS
        )
        assert run.digests() == straight.digests(), budget
        assert run.peaks()[0] <= budget
        assert run.summaries[0]["phase"] == "Stable"


def test_plan_of_a_file_is_run_at_once(trainer: Trainer, tmp_path) -> None:
    layout = LAYOUTS["dropout_only"]
    file, cache, caps = str(tmp_path / "plan.json"), str(tmp_path / "cache"), trainer.caps(layout, layout.dtype)
    plain = trainer.plain(layout, layout.dtype)
    slow = {"MINDSPEED_SWAP_SIM_LINK_GBPS": SLOW_LINK_GBPS}
    kept = ("--swap-plan-save", file, "--swap-plan-cache", cache)
    trainer.train(layout, layout.dtype, ADAPTIVE, *kept, caps=caps, **slow)
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"].values()
    assert plan["recomputes"]
    for flags in (("--swap-plan", file), ("--swap-plan-cache", cache)):
        run = trainer.train(layout, layout.dtype, ADAPTIVE, *flags, caps=caps, **slow)
        assert run.digests() == plain.digests()
        assert "no search" in run.output and "SearchPolicy" not in run.output
    # What is between the modules inside a module, which a planner with a link this slow and products this small leaves.
    places = {tuple(each["key"][:3]) for each in (*plan["recomputes"], *plan["swaps"])}
    names = ("mlp.pointwise", "self_attention.pointwise")
    plan["recomputes"] = [{"key": [*at, name], "nbytes": 1, "forward_ms": 1.0} for at in places for name in names]
    plan["swaps"] = []
    saved = json.loads((tmp_path / "plan.json").read_text())
    saved["plans"] = dict.fromkeys(saved["plans"], plan)
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    run = trainer.train(layout, layout.dtype, ADAPTIVE, "--swap-plan", file)
    assert run.digests() == plain.digests()
    assert run.held()[0] < 0.9 * plain.held()[0]

