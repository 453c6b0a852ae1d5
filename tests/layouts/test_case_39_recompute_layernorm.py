"""``--recompute-modules layernorm`` (CheckpointWithoutOutput) under swap."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
from layout_runs import HERE, REPOSITORY, Trainer, faults
from layouts import LAYOUTS


def test_case_39_trains_capped(trainer: Trainer):
    layout = LAYOUTS["recompute_layernorm"]
    plain, swapped = trainer.plain(layout, layout.dtype), trainer.swapped(layout, layout.dtype)
    assert faults(trainer, layout, layout.dtype, plain, swapped) == []


def test_case_39_the_inputs_of_the_norms_can_move(trainer: Trainer):
    """Saved as Megatron saves them they would stay: two per layer, more than all else that stays."""
    layout = LAYOUTS["recompute_layernorm"]
    floor = trainer.swapped(layout, layout.dtype).summaries[0]["floor"]
    shape = layout.environment(layout.dtype)
    inputs = 2 * 2 * int(shape["LAYERS"]) * int(shape["SEQ"]) * int(shape["MBS"]) * int(shape["HIDDEN"])
    assert floor["unmovable_bytes"] < inputs


@pytest.mark.parametrize("what", ["plain", "patched"])
def test_case_39_without_transformer_engine(what: str):
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "MINDSPEED_SWAP_DEVICE": "sim"}
    done = subprocess.run(
        [sys.executable, str(HERE / "recompute_program.py"), what],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if what == "plain":
        assert "NameError: name 'FP8GlobalStateManager' is not defined" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("fp8 is off without it") == 1
