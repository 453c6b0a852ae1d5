"""The table of what goes together. Errors and warnings are tested here; what works is trained by tests/layouts."""
from __future__ import annotations

import argparse
import json
import os
import subprocess

import pytest
from warm_python import python

from mindspeed_swap.errors import SettingError
from mindspeed_swap.patches import arguments, compat
from mindspeed_swap.patches.compat import COMPAT, FEATURES, Feature, NotTested, Refused, Works

# What a user types for each feature (with what Megatron needs beside it), and what of it our messages name.
TYPED = {
    compat.SMART_SWAP: ("--smart-swap", "--smart-swap"),
    compat.ADAPTIVE: ("--adaptive-memory-optimization", "--adaptive-memory-optimization"),
    compat.RECOMPUTE_SELECTIVE: ("--recompute-granularity selective", "--recompute-granularity selective"),
    compat.RECOMPUTE_FULL: (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity full",
    ),
    compat.FINE_GRAINED_OFFLOAD: ("--fine-grained-activation-offloading", "--fine-grained-activation-offloading"),
    compat.LAYER_OFFLOAD: ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers"),
    compat.OPTIMIZER_OFFLOAD: ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
    compat.CUDA_GRAPHS: ("--cuda-graph-impl local", "--cuda-graph-impl local"),
    compat.COMBINED_1F1B: ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm"),
    compat.FSDP: ("--use-megatron-fsdp", "--use-megatron-fsdp"),
    compat.LOW_PRECISION: ("--fp8-format hybrid", "--fp8-format"),
    compat.CONTEXT_PARALLEL: ("--context-parallel-size 2", "--context-parallel-size"),
    compat.TRANSFORMER_ENGINE: ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine"),
    compat.PRECISION_AWARE: ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer"),
    compat.OPTIMIZER_GRAPH: ("--optimizer-cuda-graph", "--optimizer-cuda-graph"),
    compat.OTHER_OPTIMIZER: ("--optimizer sgd", "--optimizer sgd"),
}
# Our flags as typed: with a value, where they want one.
OURS = {"--virtual-optimizer": "--virtual-optimizer all", "--swap-config": "--swap-config FILE"}
# Other names of the same.
ALSO_TYPED = {
    compat.RECOMPUTE_SELECTIVE: [("--recompute-activations", "--recompute-activations")],
    compat.CUDA_GRAPHS: [
        ("--enable-cuda-graph", "--enable-cuda-graph"),
        ("--external-cuda-graph", "--external-cuda-graph"),
        ("--cuda-graph-impl full_iteration", "--cuda-graph-impl full_iteration"),
    ],
    compat.FSDP: [("--use-torch-fsdp2", "--use-torch-fsdp2")],
    compat.LOW_PRECISION: [("--fp4-format e2m1", "--fp4-format")],
}
# The layouts of tests/layouts that show that a cell "works".
SHOWN_BY = {
    ("--smart-swap", compat.RECOMPUTE_SELECTIVE): ["recompute_core_attn", "recompute_mlp", "recompute_layernorm"],
    ("--smart-swap", compat.RECOMPUTE_FULL): ["recompute_block", "recompute_uniform"],
    ("--smart-swap", compat.OPTIMIZER_OFFLOAD): ["optimizer_offload"],
    ("--adaptive-memory-optimization", compat.OPTIMIZER_OFFLOAD): ["optimizer_offload"],  # test_adaptive.py
    ("--swap-config", compat.OPTIMIZER_OFFLOAD): ["optimizer_offload"],  # tests/fine_grained/test_real_training.py
}
# Of MindSpeed: Megatron's parser does not know them.
MINDSPEED = (compat.MEMORY_FRAGMENTATION, compat.MINDSPEED_MEMORY)

# Parses each line of arguments with Megatron's own parser, and reports what its features and our check say.
PROGRAM = """
import json, sys
import mindspeed_swap.megatron_adaptor
from megatron.training import arguments as megatron
from mindspeed_swap.errors import SettingError
from mindspeed_swap.patches import compat
answers = []
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line.split()
    args = megatron.parse_args()
    if args.transformer_impl == "transformer_engine" and "--transformer-impl" not in line:
        args.transformer_impl = "local"  # the default, which is not what the line is about
    found = {feature.title: feature.in_use(args) for feature in compat.FEATURES}
    try:
        megatron.validate_args(args)
    except SettingError as error:
        refused = str(error)
    except BaseException:  # Megatron's own: the line is not a whole run
        refused = ""
    else:
        refused = ""
    answers.append([found, refused, compat.untested(args)])
print(json.dumps(answers))
"""


OUR_FEATURES = {"--smart-swap": compat.SMART_SWAP, "--adaptive-memory-optimization": compat.ADAPTIVE}


def lines(ours: str) -> list[tuple[Feature, str, str]]:
    """What is typed beside ``ours``. How two of ours go together stands in one of their rows."""
    return [
        (feature, typed, named)
        for feature in FEATURES
        if feature not in MINDSPEED and (feature not in OUR_FEATURES.values() or feature in COMPAT[ours])
        for typed, named in [TYPED[feature], *ALSO_TYPED.get(feature, [])]
    ]


@pytest.fixture(scope="module")
def answers() -> list:
    """Of every line, with each of our flags in front of it: (features in use, error text, warnings)."""
    pytest.importorskip("megatron.training")
    asked = [f"{OURS.get(ours, ours)} {typed}" for ours in COMPAT for _, typed, _ in lines(ours)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP")}
    done = subprocess.run(
        [python(), "-c", PROGRAM, json.dumps(asked)],
        env=clean | {"PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_cell_as_the_table_says(answers):
    cells = [(ours, *line) for ours in COMPAT for line in lines(ours)]
    for (ours, feature, _, named), (found, refused, untested) in zip(cells, answers, strict=True):
        own = {OUR_FEATURES[ours].title: ours} if ours in OUR_FEATURES else {}
        assert {title: flag for title, flag in found.items() if flag} == own | {feature.title: named}
        cell = COMPAT[ours].get(feature)
        if cell is None and named in COMPAT:
            continue  # two flags of ours: the row of the other one says it
        if isinstance(cell, Refused):
            assert refused.startswith(f"{ours} cannot be used with {named}: {cell.why}; ")
            assert refused.endswith(cell.remedy or f"remove {named}")
        else:
            assert refused == ""
        expected = [f"{ours} with {named} is not tested: compare the losses of some steps with a run without {ours}"]
        assert untested == (expected if isinstance(cell, NotTested) else [])


def test_every_flag_has_every_cell():
    of_the_optimizer = {compat.PRECISION_AWARE, compat.OPTIMIZER_GRAPH, compat.OTHER_OPTIMIZER}
    our_own = set(OUR_FEATURES.values())
    assert set(COMPAT["--smart-swap"]) == set(FEATURES) - of_the_optimizer - our_own
    assert set(COMPAT["--adaptive-memory-optimization"]) == set(FEATURES) - of_the_optimizer - {compat.ADAPTIVE}
    assert set(COMPAT["--swap-config"]) == set(FEATURES) - of_the_optimizer
    assert of_the_optimizer < set(COMPAT["--virtual-optimizer"])
    assert set(TYPED) == set(FEATURES) - set(MINDSPEED)


@pytest.mark.parametrize("flag", ["memory_fragmentation", "recompute_in_bubble", "swap_attention"])
@pytest.mark.parametrize("ours", ["smart_swap", "adaptive_memory_optimization", "swap_config"])
def test_what_mindspeed_offers_is_refused(ours, flag):
    args = argparse.Namespace(**{"smart_swap": False, ours: True, flag: True})
    ours, flag = (f"--{name.replace('_', '-')}" for name in (ours, flag))
    with pytest.raises(SettingError, match=f"{ours} cannot be used with {flag}: "):
        arguments.check(args)


def test_what_works_is_trained_somewhere():
    from layouts import LAYOUTS as trained

    rows = {ours: row for ours, row in COMPAT.items() if ours != "--virtual-optimizer"}  # that one: test_megatron.py
    works = {(ours, f) for ours, row in rows.items() for f in row if isinstance(row[f], Works)}
    assert works - {(ours, compat.TRANSFORMER_ENGINE) for ours in rows} == set(SHOWN_BY)  # that one: tests/gpu
    for (_, feature), names in SHOWN_BY.items():
        for name in names:
            flag = TYPED[feature][1]
            assert flag in " ".join(trained[name].flags)


def test_only_what_could_not_be_run_is_not_tested():
    for row in COMPAT.values():
        untested = {feature for feature, cell in row.items() if isinstance(cell, NotTested)}
        assert untested <= {compat.FSDP, compat.LOW_PRECISION, compat.CONTEXT_PARALLEL}


def test_all_errors_at_once():
    args = argparse.Namespace(
        smart_swap=True, fine_grained_activation_offloading=True, overlap_moe_expert_parallel_comm=True
    )
    with pytest.raises(SettingError) as error:
        arguments.check(args)
    first, second = str(error.value).splitlines()
    assert "--fine-grained-activation-offloading" in first and "--overlap-moe-expert-parallel-comm" in second


def test_without_a_flag_of_ours_nothing_is_refused():
    arguments.check(argparse.Namespace(smart_swap=False, fine_grained_activation_offloading=True))


@pytest.mark.parametrize("flag", COMPAT)
def test_arguments_out_of_a_yaml_file_are_refused(flag):
    given = argparse.Namespace(yaml_cfg="model.yaml", **{flag.lstrip("-").replace("-", "_"): "all"})
    with pytest.raises(SettingError, match=f"^{flag} cannot be used with --yaml-cfg: .* on the command line$"):
        arguments._parse_args(lambda: given)()
    alone = argparse.Namespace(yaml_cfg="model.yaml")
    assert arguments._parse_args(lambda: alone)() is alone
    given.yaml_cfg = None
    assert arguments._parse_args(lambda: given)() is given


def test_a_plan_file_beside_a_list_of_ones_own_is_to_be_left_out():
    given = argparse.Namespace(swap_config="a.yaml", swap_plan_save="plan")
    told = "--swap-plan-save is a setting of .*: leave it out, --swap-config says itself what moves"
    with pytest.raises(SettingError, match=told):
        arguments.check(given)
