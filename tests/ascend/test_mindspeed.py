"""MindSpeed's own feature and patch managers, where MINDSPEED_SRC is a checkout of it. (Stand-in: tests/patches.)"""
from __future__ import annotations

import os

import pytest
from ascend import run

SOURCE = os.environ.get("MINDSPEED_SRC")
CODE = """
import importlib.util, sys, types, argparse
if importlib.util.find_spec("megatron_adaptor") is None:  # a package that newer ones import first, and need not here
    sys.modules["megatron_adaptor"] = types.ModuleType("megatron_adaptor")
import patches
sys.modules["mindspeed_swap.patches"] = patches
from mindspeed_swap.patches import mindspeed_features
from mindspeed_swap.patches.arguments import add_arguments
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as manager
from mindspeed.patch_utils import MindSpeedPatchesManager as patch_manager
names = [feature.feature_name for feature in manager.FEATURES_LIST]
assert {"smart_swap", "virtual_optimizer"} <= set(names), names

# Theirs first, and applied: a module to patch, and torch.Tensor.
target = types.ModuleType("some_megatron"); sys.modules["some_megatron"] = target
def step(): return "plain"
target.step = step
def other_wrapper(original): return lambda: original() + " other"
def theirs_wrapper(original): return lambda: "theirs"
theirs_wrapper.__module__ = "mindspeed.core.memory.smart_swap.swap_megatron_adaptor"
patch_manager.register_patch("some_megatron.step", other_wrapper)
patch_manager.register_patch("some_megatron.step", theirs_wrapper)
import torch
from mindspeed.features_manager.optimizer.virtual_optimizer import swap_tensor_copy_wrapper
torch.Tensor.copy_ = swap_tensor_copy_wrapper(torch.Tensor.copy_)
patch_manager.apply_patches()
assert target.step() == "theirs" and torch.ones(1).copy_(torch.ones(1)) is None

validated = []
assert mindspeed_features.take_over(add_arguments, validated.append)
assert target.step() == "plain other" and torch.ones(1).copy_(torch.ones(1)) is not None
ours = [feature for feature in manager.FEATURES_LIST if type(feature).__module__ == mindspeed_features.__name__]
assert sorted(feature.feature_name for feature in ours) == [
    "adaptive_memory_optimization", "smart_swap", "virtual_optimizer"]
assert len(manager.FEATURES_LIST) == len(names) + 1
parser = argparse.ArgumentParser(conflict_handler="error", allow_abbrev=False)
for feature in manager.FEATURES_LIST:
    if feature in ours:
        feature.register_args(parser)
add_arguments(parser)
args = parser.parse_args(["--smart-swap", "--virtual-optimizer", "all", "--swap-host-memory", "2"])
assert args.smart_swap and args.virtual_optimizer == ["all"]
args.optimization_level = 2
for feature in ours:
    feature.validate_args(args)
    feature.pre_validate_args(args), feature.post_validate_args(args), feature.pre_register_patches(patch_manager, args)
    if feature.is_need_apply(args):
        feature.register_patches(patch_manager, args)
assert validated == [args] * 3
print("taken over", len(manager.FEATURES_LIST), "features")
"""


@pytest.mark.skipif(SOURCE is None, reason="MINDSPEED_SRC is not set")
def test_the_real_managers(lane_python, fake_runtime):
    paths = os.pathsep.join([os.getcwd(), str(SOURCE)])
    done = run(lane_python, fake_runtime, "-c", CODE, PYTHONPATH=paths)
    assert done.returncode == 0 and "taken over" in done.stdout, done.stdout + done.stderr[-3000:]
