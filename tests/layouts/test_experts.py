"""Layers of experts run again without their router, which counts tokens, adds to logged losses and draws noise."""
from __future__ import annotations

import json

import pytest
from layout_runs import ADAPTIVE, Run, Trainer
from layouts import Layout

pytest.importorskip("megatron.training")

LAYERS, MICROBATCHES = 3, 2
FLAGS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
    "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --moe-z-loss-coeff 0.001 "
    "--moe-input-jitter-eps 0.1 --moe-shared-expert-intermediate-size 64 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)
EXPERTS = Layout(
    "experts",
    tuple(FLAGS.split()),
    {"LAYERS": str(LAYERS), "MBS": "8", "GBS": str(8 * MICROBATCHES), "ITERS": "6"},
    ranks=1,
)


def told(run: Run) -> list[str]:
    """Of every step, what is logged but its time: losses of the router among them."""
    lines = [line.partition("consumed samples")[2] for line in run.output.splitlines() if "lm loss" in line]
    assert len(lines) == 6 and all("load_balancing_loss" in line and "z_loss" in line for line in lines)
    return [" ".join(part for part in line.split("|") if "elapsed" not in part) for line in lines]


@pytest.mark.parametrize("name", ["mlp", pytest.param("layer", marks=pytest.mark.full)])
def test_they_run_again_with_the_same_bits(trainer: Trainer, tmp_path, name: str) -> None:
    plain = trainer.train(EXPERTS, "bf16")
    file = tmp_path / "plan.json"
    kept = trainer.train(EXPERTS, "bf16", ADAPTIVE, "--swap-plan-save", str(file))
    saved = json.loads(file.read_text())
    (plan,) = saved["plans"].values()
    assert plan["recomputes"] == [] and kept.digests() == plain.digests() and told(kept) == told(plain)
    keys = [[microbatch, 0, layer, name] for microbatch in range(MICROBATCHES) for layer in range(1, LAYERS + 1)]
    plan["recomputes"] = [{"key": key, "nbytes": 1, "forward_ms": 1.0} for key in keys]
    saved["plans"] = dict.fromkeys(saved["plans"], plan)
    file.write_text(json.dumps(saved))
    again = trainer.train(EXPERTS, "bf16", ADAPTIVE, "--swap-plan", str(file))
    assert again.digests() == plain.digests()
    assert told(again) == told(plain)
    (held,), (before,) = again.held(), plain.held()
    assert held < 0.8 * before
