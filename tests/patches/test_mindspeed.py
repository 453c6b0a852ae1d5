"""Beside MindSpeed our features stand in its manager, whichever of the two is imported first."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from warm_python import python

pytest.importorskip("megatron.training")
STAND_IN = Path(__file__).parent / "stand_in"

ORDERS = {
    "ours first": "import mindspeed_swap.megatron_adaptor\nimport mindspeed.megatron_adaptor",
    "theirs first": "import mindspeed.megatron_adaptor\nimport mindspeed_swap.megatron_adaptor",
}
PROGRAM = """
{imports}
import torch
from megatron.training import arguments, training
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as manager
"""


def run(imports: str, code: str, *argv: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP")}
    environment["PYTHONWARNINGS"] = "ignore"
    environment["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python(), "-c", PROGRAM.format(imports=imports) + code, *argv], env=environment | settings,
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ORDERS)
def test_ours_take_the_place_of_theirs(order):
    out = run(
        ORDERS[order],
        """
features = {feature.feature_name: type(feature).__module__ for feature in manager.FEATURES_LIST}
assert list(features) == ["other_thing", "virtual_optimizer", "smart_swap", "adaptive_memory_optimization"], features
assert sorted(set(features.values())) == ["mindspeed.features_manager", "mindspeed_swap.patches.mindspeed_features"]
from mindspeed.features_manager import FEATURES_LIST
assert {type(feature).__module__ for feature in FEATURES_LIST} == {"mindspeed_swap.patches.mindspeed_features"}
args = arguments.parse_args(ignore_unknown_args=True)  # two adders of the same flags, and no conflict
assert args.smart_swap and args.virtual_optimizer == ["all"] and args.other_thing, args
assert args.swap_host_memory == 1.0 and not args.adaptive_memory_optimization
""",
        "--smart-swap", "--virtual-optimizer", "all", "--swap-host-memory", "1",
    )  # fmt: skip
    assert out.count("[mindspeed_swap] mindspeed: --smart-swap, --virtual-optimizer") == 1


@pytest.mark.parametrize("order", ORDERS)
def test_what_theirs_had_patched_is_undone_and_other_patches_stay(order):
    out = run(
        ORDERS[order],
        """
assert torch.ones(2).copy_(torch.zeros(2)) is not None  # MindSpeed's own copy_ returns nothing
assert training.train_step.__qualname__.startswith("OtherFeature.register_patches"), training.train_step
assert training.train_step.__closure__[0].cell_contents.__module__ == "megatron.training.training"
""",
        "--smart-swap", "--virtual-optimizer", "all",
    )  # fmt: skip
    assert ("what they patched is undone" in out) == (order == "theirs first")


@pytest.mark.parametrize("order", ORDERS)
def test_validation_starts_what_is_asked_for_once(order):
    out = run(
        ORDERS[order],
        """
import os
from mindspeed_swap import runtime
os.environ["MINDSPEED_SWAP_DEVICE"] = "sim"  # only now: Megatron is not to run on it
args = arguments.parse_args(ignore_unknown_args=True)
manager.validate_features_args(args)
assert runtime.started()
manager.validate_features_args(args)
""",
        "--smart-swap",
    )
    assert out.count("smart-swap: ") == 1


def test_without_a_flag_nothing_starts():
    run(
        ORDERS["ours first"],
        """
import sys
args = arguments.parse_args(ignore_unknown_args=True)
manager.validate_features_args(args)
manager.validate_features_args(type("TransformerConfig", (), {})())  # MindSpeed asks about these too
assert "mindspeed_swap.runtime" not in sys.modules
""",
    )


def test_a_mindspeed_that_cannot_be_imported_is_left_alone(tmp_path):
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("import torch_npu_that_is_not_there\n")
    code = "import mindspeed_swap.megatron_adaptor"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([python(), "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "its flags are left alone" in done.stdout and "torch_npu_that_is_not_there" in done.stdout
