"""What ``--virtual-optimizer`` accepts, and what it says about the rest."""
from __future__ import annotations

import argparse

import pytest

from mindspeed_swap.errors import SettingError
from mindspeed_swap.patches.arguments import add_arguments, check
from mindspeed_swap.units import GIB
from mindspeed_swap.virtual_optimizer.amount import (
    VirtualOptions,
    parse_amounts,
    virtual_options,
)


@pytest.mark.parametrize(
    ("words", "stages", "expected"),
    [
        (["all"], 1, (None,)),
        (["all"], 4, (None,) * 4),
        (["2.0"], 3, (2 * GIB,) * 3),
        (["0.5"], 1, (GIB // 2,)),
        (["6", "5", "4", "3"], 4, (6 * GIB, 5 * GIB, 4 * GIB, 3 * GIB)),
        (["6", "4", "2", "0"], 4, (6 * GIB, 4 * GIB, 2 * GIB, 0)),
        (["1e-3", "0"], 2, (1073741, 0)),
    ],
)
def test_amounts(words, stages, expected):
    assert parse_amounts(words, stages) == expected


@pytest.mark.parametrize(
    ("words", "stages", "message"),
    [
        (["0"], 2, r"--virtual-optimizer 0: moves nothing; give 'all' or a number of GB above 0, or leave the flag"),
        (["0", "0.0"], 2, r"--virtual-optimizer 0 0.0: moves nothing"),
        (["-1"], 1, r"--virtual-optimizer -1: expected 'all' or numbers of GB \(1024\^3 bytes\), none below 0"),
        (["4", "-1"], 2, r"--virtual-optimizer -1: "),
        (["many"], 1, r"--virtual-optimizer many: expected"),
        (["nan"], 1, r"--virtual-optimizer nan: expected"),
        (["inf"], 1, r"--virtual-optimizer inf: expected"),
        (["1e300"], 1, r"--virtual-optimizer 1e300: expected"),
        (["ALL"], 1, r"--virtual-optimizer ALL: expected 'all'"),
        (["all", "4"], 2, r"--virtual-optimizer all 4: 'all' stands alone"),
        (["4", "all"], 2, r"--virtual-optimizer 4 all: 'all' stands alone"),
        (["1", "2", "3"], 4, r"^--virtual-optimizer: 3 values for 4 pipeline stages; give 1 or 4$"),
        (["1", "2"], 1, r"^--virtual-optimizer: 2 values for 1 pipeline stage; give 1 value$"),
    ],
)
def test_refused(words, stages, message):
    with pytest.raises(SettingError, match=message):
        parse_amounts(words, stages)


def parsed(*words, **megatron):
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    vars(args).update({"pipeline_model_parallel_size": 1, "optimizer": "adam"} | megatron)
    return args


def test_flags():
    assert virtual_options(parsed()) is None
    assert virtual_options(parsed("--virtual-optimizer", "all")) == VirtualOptions((None,), "auto", False)
    args = parsed(
        *["--virtual-optimizer", "2", "0", "--virtual-optimizer-mode", "mapped", "--virtual-optimizer-master"],
        pipeline_model_parallel_size=2,
    )
    assert virtual_options(args) == VirtualOptions((2 * GIB, 0), "mapped", True)
    with pytest.raises(SettingError, match=r"--virtual-optimizer -2.5: expected"):
        virtual_options(parsed("--virtual-optimizer", "-2.5"))


@pytest.mark.parametrize("words", ["--virtual-optimizer-mode mapped", "--virtual-optimizer-master"])
def test_settings_of_nothing(words):
    with pytest.raises(SettingError, match=f"{words.split()[0]} changes nothing without --virtual-optimizer"):
        virtual_options(parsed(*words.split()))


@pytest.mark.parametrize(
    "other",
    ["optimizer_cpu_offload", "use_precision_aware_optimizer", "use_megatron_fsdp", "use_torch_fsdp2",
     "optimizer_cuda_graph"],
)  # fmt: skip
def test_other_owners_of_the_state(other):
    flag = "--" + other.replace("_", "-")
    with pytest.raises(SettingError, match=f"--virtual-optimizer cannot be used with {flag}: "):
        check(parsed("--virtual-optimizer", "all", **{other: True}))
    check(parsed("--virtual-optimizer", "all", **{other: False}))


def test_only_adam():
    with pytest.raises(SettingError, match="cannot be used with --optimizer sgd: .*; use --optimizer adam"):
        check(parsed("--virtual-optimizer", "1", optimizer="sgd"))
