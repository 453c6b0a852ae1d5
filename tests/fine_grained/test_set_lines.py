"""The log of a rank: the documented greps print the documented lines."""
from __future__ import annotations

import subprocess

import pytest
from cases import CASES, CONFIGS, EXPECTED, GREPS
from layer_steps import Step, layer_names

from mindspeed_swap.fine_grained.front_end import FineGrained
from mindspeed_swap.fine_grained.parts import Parts
from mindspeed_swap.fine_grained.planning import Planning
from mindspeed_swap.fine_grained.schema import read_swap_config
from mindspeed_swap.fine_grained.setlines import set_lines, write_log

NAMES = layer_names(Step().trace())


def grep(name: str, folder) -> str:
    return subprocess.run(GREPS[name], shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", CASES)
def test_documented_greps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read_swap_config(str(CONFIGS / f"{name}.yaml"), 4)
    parts = Parts(config, NAMES, [[0, 1, 2, 3]])
    planning = Planning(Step().trace(), parts)
    assert planning.reasons  # so that the block before the lines is not empty
    write_log(0, planning.reasons, set_lines(parts))
    printed = grep(name, tmp_path)
    expected = (EXPECTED / f"{name}.txt").read_text()
    assert printed.strip("\n") == expected.strip("\n")
    assert printed.rstrip("\n") == expected.rstrip("\n")  # at most empty lines beside them


def lines(tmp_path, text: str, chunks=((0, 1, 2, 3),), stage: int = 0, stages: int = 1, **given) -> list[str]:
    path = tmp_path / "swap.yaml"
    path.write_text(text)
    config = read_swap_config(str(path), 8, stages, len(chunks), **given)
    step = Step(tuple(tuple(chunk) for chunk in chunks))
    return set_lines(Parts(config, layer_names(step.trace()), chunks, stage))


def test_only_the_layers_of_this_rank_by_their_global_numbers(tmp_path):
    text = "swap_config: {swap: True, layer_swap: [{backward_prefetch: 4, layers: [1, 6, 7]}]}"
    assert lines(tmp_path, text, ((2, 3), (6, 7)), 1, 2) == [
        "Set layer swap at layer 6 and value is: 4", "Set layer swap at layer 7 and value is: 4",
    ]  # fmt: skip


def test_what_a_regular_expression_found_is_shown(tmp_path):
    text = "swap_config: {swap: True, op_swap: [{op_name: ['.*norm', 'mlp.linear_fc.*', '.*.flash_attention'], " \
           "backward_prefetch: 4, layers: [1]}]}"  # fmt: skip
    assert lines(tmp_path, text) == [
        "Set op_swap at layer 1: .input_layernorm, value=4, .pre_mlp_layernorm, value=4, mlp.linear_fc1, value=4, "
        "mlp.linear_fc2, value=4, self_attention.core_attention, value=4"
    ]


def test_order_within_a_layer(tmp_path):
    text = """
recompute_config:
  {recompute: [2], select_recompute: {attention.flash_attention: True, mlp: [0]}, select_comm_recompute: [0]}
swap_config:
  swap: True
  layer_swap: [{backward_prefetch: 9, layers: [0]}]
  op_swap: [{op_name: mlp, backward_prefetch: 3, layers: [0, 2]}]
"""
    assert lines(tmp_path, text, ((0, 2),), sequence_parallel=True) == [
        "Set select recompute at layer 0: attention.flash_attention, mlp",
        "Set select comm recompute at layer 0",
        "Set layer swap at layer 0 and value is: 9",
        "Set op_swap at layer 0: .mlp, value=3",
        "Set full recompute at layer 2",
        "Set op_swap at layer 2: .mlp, value=3",
    ]


def test_a_run_that_ends_early_leaves_the_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fine = FineGrained(read_swap_config(str(CONFIGS / "case2_layers.yaml"), 4), 5)
    fine.close()  # before the first step: no layers are known
    assert not (tmp_path / "output").exists()
    fine.meet([NAMES], 0)
    fine.close()
    log = (tmp_path / "output" / "msrun" / "worker_5.log").read_text()
    assert log == (
        "\n-INFO - Set layer swap at layer 0 and value is: 20\n-INFO - Set layer swap at layer 3 and value is: 20\n\n"
    )


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").write_text("in the way")
    fine = FineGrained(read_swap_config(str(CONFIGS / "case2_layers.yaml"), 4), 0)
    fine.meet([NAMES], 0)
    fine.close()
    assert "swap-config: log not written, training goes on" in capsys.readouterr().out
