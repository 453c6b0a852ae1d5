"""What a swap configuration may say, and what each wrong value is called."""
from __future__ import annotations

import hashlib

import pytest
from cases import CASES, CONFIGS

from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.layers import ALL, NONE
from mindspeed_swap.fine_grained.schema import DEFAULT_OPERATOR, read_swap_config

# Of the files as the feature's documentation gives them.
DIGESTS = {
    "case1_default": "a067df0812f80330",
    "case2_layers": "0d7f3eeb4061dd42",
    "case3_operators": "4ae16ff4fe25358f",
    "case4_with_recompute": "2814c0ec855d5f41",
}
SWAP = "swap_config: {swap: True, "
ENTRY = "backward_prefetch: 1, layers: "


def read(path: str, **given):
    return read_swap_config(path, 4, **given)


def test_the_four_files_are_as_documented_byte_for_byte():
    found = {name: hashlib.sha256((CONFIGS / f"{name}.yaml").read_bytes()).hexdigest()[:16] for name in CASES}
    assert found == DIGESTS


@pytest.mark.parametrize("name", CASES)
def test_the_four_files_load(name):
    config = read(str(CONFIGS / f"{name}.yaml"))
    assert config.swap and not config.recompute
    assert config.notes == ("context.memory_optimize_level has no effect: nothing here corresponds to it",)
    assert bool(config.select) == (name == "case4_with_recompute")


def test_nothing_named_is_flash_attention_of_all_layers(written):
    (entry,) = read(written("swap_config: {swap: True}")).ops
    assert (entry.name, entry.value, entry.layers) == (DEFAULT_OPERATOR, 1, ALL)
    assert entry.release(7) == 7
    config = read(written("swap_config: {swap: True, default_prefetch: 6, op_swap: null, layer_swap: }"))
    assert [entry.value for entry in config.ops] == [6] and config.layer_swap == ()


def test_either_list_switches_the_default_off(written):
    config = read(written(SWAP + "default_prefetch: 3, layer_swap: [{backward_prefetch: 2, layers: True}]}"))
    assert config.ops == () and [entry.value for entry in config.layer_swap] == [2]
    assert config.layer_swap[0].release(2) == 1
    assert config.notes == ("default_prefetch has no effect beside layer_swap or op_swap",)


def test_layers_in_a_list_per_stage_names_in_a_list(written):
    text = SWAP + "op_swap: [{op_name: [mlp, attention.wo, mlp], backward_prefetch: 2, layers: [[0, 1], [3]]}]}"
    config = read(written(text))
    assert [(entry.name, sorted(entry.layers.chosen)) for entry in config.ops] == [
        ("mlp", [0, 1, 3]), ("attention.wo", [0, 1, 3]),
    ]  # fmt: skip


def test_of_one_name_entries_stay_in_order_and_equal_values_may_overlap(written):
    text = SWAP + (
        "op_swap: [{op_name: mlp, backward_prefetch: 2, layers: [0, 1]}, {op_name: attention, backward_prefetch: 9, "
        "layers: [0]}, {op_name: mlp, backward_prefetch: 2, layers: [1, 2]}]}"
    )
    assert [(e.name, e.key[-2]) for e in read(written(text)).ops] == [("mlp", "0"), ("mlp", "2"), ("attention", "1")]


def test_false_as_layers_is_said_to_have_no_effect(written):
    config = read(written(SWAP + "layer_swap: [{backward_prefetch: 2, layers: False}]}"))
    assert config.ops == config.layer_swap == ()
    assert any(note.startswith("swap_config.layer_swap[0].layers is False") for note in config.notes)
    assert any("nothing is swapped" in note for note in config.notes)


def test_swap_off_ignores_the_lists_and_says_so(written):
    text = "swap_config: {swap: False, layer_swap: [{backward_prefetch: 2, layers: True}]}\n" \
           "recompute_config: {recompute: [2]}"  # fmt: skip
    config = read(written(text))
    assert config.layer_swap == config.ops == ()
    assert config.notes == ("swap is False: layer_swap and op_swap are ignored",)
    assert config.recompute.first == ((2,),)
    assert config.recompute.among([[0, 1, 2, 3]], 0) == {0, 1}


def test_recompute_without_swap_keeps_its_meaning(written):
    def recompute(value: str, stages: int = 1, chunks: int = 1):
        text = f"swap_config: {{swap: False}}\nrecompute_config: {{recompute: {value}}}"
        return read(written(text), stages=stages, chunks=chunks).recompute

    assert recompute("True") == ALL and recompute("False") == NONE and not recompute("[0]")
    assert recompute("[1, 2]", 2).among([[2, 3]], 1) == {2, 3}
    assert recompute("[[1, 0], [0, 1]]", 2, 2).among([[0], [2]], 0) == {0}
    text = "swap_config: {swap: False}\nrecompute_config: {select_recompute: [mlp, attention]}"
    assert read(written(text)).select == {"mlp": ALL, "attention": ALL}
    assert read(written(text.replace("[mlp, attention]", "{mlp: [0], attention: [2]}"))).select["attention"].first


def test_communication_needs_sequence_parallel(written):
    path = written("swap_config: {swap: True}\nrecompute_config: {select_comm_recompute: [1]}")
    config = read(path, sequence_parallel=True)
    assert 1 in config.comm and 0 not in config.comm
    assert any(note.startswith("select_comm_recompute") for note in config.notes)
    with pytest.raises(SettingError, match="recompute_config.select_comm_recompute: needs --sequence-parallel"):
        read(path)


@pytest.mark.parametrize(
    "spelling", ["memory_optimize_level=O0", "\n  memory_optimize_level=O0", "{memory_optimize_level: O1}"]
)
def test_both_spellings_are_accepted_and_said_to_have_no_effect(written, spelling):
    config = read(written(f"context: {spelling}\nswap_config: {{swap: True}}\n"))
    assert config.notes == ("context.memory_optimize_level has no effect: nothing here corresponds to it",)


def test_the_rest_of_a_configuration_is_named_in_one_line(written):
    text = """
runner_config: {epochs: 1}
context: {mode: 0, memory_optimize_level: O0}
model: {arch: {type: Llama}, model_config: {num_layers: 4, hidden_size: 8}}
optimizer: {type: AdamW}
swap_config: {swap: True}
"""
    notes = read(written(text)).notes
    assert len(notes) == 2
    assert notes[1] == (
        "without effect here: runner_config, optimizer, context.mode, model.arch, model.model_config.hidden_size"
    )


def test_merged_keys_and_aliases_are_read(written):
    text = """
common: &common {backward_prefetch: 3}
swap_config:
  swap: True
  op_swap:
    - {<<: *common, op_name: mlp, layers: &layers [0, 1]}
    - {<<: *common, op_name: attention, layers: *layers}
"""
    assert [(e.name, e.value, sorted(e.layers.chosen)) for e in read(written(text)).ops] == [
        ("mlp", 3, [0, 1]), ("attention", 3, [0, 1]),
    ]  # fmt: skip


GROWING = list(zip("abcdefgh", "bcdefghi", strict=True))  # each line ten times the one before
WRONG = [
    (SWAP + "lair_swap: []}", r"swap.yaml:1: swap_config.lair_swap: unknown: did you mean layer_swap\?"),
    (SWAP + "layer_swap: [{backward_prefech: 1, layers: [0]}]}", r"layer_swap\[0\].backward_prefech: unknown"),
    (SWAP + "layer_swap: [{layers: [0]}]}", r"layer_swap\[0\].backward_prefetch: missing"),
    (SWAP + "layer_swap: [{backward_prefetch: 1}]}", r"layer_swap\[0\].layers: missing"),
    (SWAP + "layer_swap: [{op_name: mlp, " + ENTRY + "[0]}]}", r"layer_swap\[0\].op_name: unknown"),
    (SWAP + "op_swap: [{" + ENTRY + "[0]}]}", r"op_swap\[0\].op_name: missing"),
    (SWAP + "layer_swap: [{" + ENTRY + "[0, True]}]}", r"layers\[1\]: expected a layer number, found True"),
    (SWAP + "layer_swap: [{" + ENTRY + "[0, 1.0]}]}", r"layers\[1\]: expected a layer number, found 1.0"),
    (SWAP + "layer_swap: [{" + ENTRY + "[[0], [1, 99]]}]}", r"layers\[1\]\[1\]: layer 99: .* layers 0 to 3"),
    (SWAP + "layer_swap: [{" + ENTRY + "[0, [1]]}]}", r"layers\[1\]: .* mixed"),
    (SWAP + "layer_swap: [{" + ENTRY + "[-1]}]}", r"layers\[0\]: layer -1"),
    (SWAP + "layer_swap: [{" + ENTRY + "[]}]}", r"layers: empty"),
    (SWAP + "layer_swap: [{" + ENTRY + "[[], []]}]}", r"layers: empty"),
    (SWAP + "layer_swap: [{" + ENTRY + "3}]}", r"layers: expected a list"),
    (SWAP + "layer_swap: []}", r"swap_config.layer_swap: expected a list with at least one"),
    (SWAP + "layer_swap: {" + ENTRY + "[0]}}", r"swap_config.layer_swap: expected a list"),
    (SWAP + "layer_swap: [{backward_prefetch: 1.5, layers: [0]}]}", r"backward_prefetch: expected a whole number"),
    (SWAP + "layer_swap: [{backward_prefetch: -1, layers: [0]}]}", r"backward_prefetch: expected a whole number"),
    (SWAP + "layer_swap: [{backward_prefetch: True, layers: [0]}]}", r"backward_prefetch: expected a whole number"),
    (SWAP + "layer_swap: [{" + ENTRY + "True}, {" + ENTRY + "[0]}]}", r"\[0\].layers: True has all layers already"),
    (
        SWAP + "layer_swap: [{backward_prefetch: 1, layers: [0, 2]}, {backward_prefetch: 3, layers: [2]}]}",
        r"layer_swap\[1\].backward_prefetch: Inconsistent 'backward_prefetch' values: 3 here and 1 in .* for layer 2",
    ),
    (SWAP + "op_swap: [{op_name: 3, " + ENTRY + "[0]}]}", r"op_name: expected the name"),
    (SWAP + "op_swap: [{op_name: [], " + ENTRY + "[0]}]}", r"op_name: empty"),
    (SWAP + "op_swap: [{op_name: [mlp, ''], " + ENTRY + "[0]}]}", r"op_name\[1\]: is empty"),
    (SWAP + "op_swap: [{op_name: 'a(', " + ENTRY + "[0]}]}", r"op_name: .*no regular expression"),
    (SWAP + "op_swap: [{op_name: 'mlp..a', " + ENTRY + "[0]}]}", r"op_name: .*empty level"),
    ("swap_config: {swap: yes please}", r"swap_config.swap: expected True or False"),
    ("swap_config: {swap: 1}", r"swap_config.swap: expected True or False"),
    ("swap_config: [1]", r"swap_config: expected keys"),
    (SWAP + "default_prefetch: '3'}", r"default_prefetch: expected a whole number"),
    ("model: {model_config: {num_layers: 5}}\nswap_config: {}", r"yaml:1: .*: 5, but --num-layers is 4"),
    ("recompute_config: {recompute: True}", r"swap_config: missing"),
    ("swap_config: {swap: True}\nrecompute_config: {recompte: True}", r"yaml:2: recompute_config.recompte: unknown"),
    ("swap_config: {swap: True}\nrecompute_config: {recompute: 2}", r"recompute_config.recompute: expected a list"),
    ("swap_config: {swap: False}\nrecompute_config: {recompute: 2}", r"recompute_config.recompute: without swap"),
    ("swap_config: {swap: False}\nrecompute_config: {recompute: [1, 2]}", r"recompute: expected 1 numbers, one per"),
    ("swap_config: {swap: True}\nrecompute_config: {select_recompute: True}", r"select_recompute: expected False or"),
    ("swap_config: {swap: True}\nrecompute_config: {select_recompute: {mlp: 2}}", r"select_recompute.mlp: expected a"),
    ("swap_config: {swap: True}\nrecompute_config: {recompute: []}", r"recompute_config.recompute: empty"),
    ("swap_config: {swap: True}\nrecompute_config: {recompute: 0}", r"recompute_config.recompute: expected a list"),
    ("swap_config: {swap: True}\nrecompute_config: {select_recompute: []}", r"select_recompute: expected False or"),
    ("swap_config: {swap: True}\nmodel: 3", r"yaml:2: model: expected keys, found 3"),
    ("swap_config: {swap: True}\nmodel: {model_config: [1]}", r"model.model_config: expected keys"),
    ("swap_config: {swap: True}\ncontext: [1]", r"context: expected keys"),
    ("", r"swap_config: missing: this file has no sections"),
    ("- 1", r"swap_config: missing"),
    ("swap_config: {swap: True", r"yaml:1: not YAML"),
    ("swap_config:\n\tswap: True", r"yaml:2: not YAML"),
    ("swap_config: {swap: True}\n---\na: 1", r"not YAML"),
    ("swap_config: {swap: True, swap: False}", r"swap_config.swap: given twice"),
    ("swap_config: !!python/object/apply:os.system ['true']", r"not YAML that is read here: tag"),
    (SWAP + "default_prefetch: 010}", r"010: write it as a plain decimal"),
    (SWAP + "default_prefetch: 1:30}", r"1:30: write it as a plain decimal"),
    (b"swap_config: {swap: True} # \xff", r"not UTF-8: byte 28 is 0xff"),
    ("a: [" * 500, r"nested too deeply|not YAML"),
    ("a: &a [1]\n" + "swap_config: {swap: True, layer_swap: &b [*b]}", r"nested too deeply"),
    ("x" * (300 << 10), r"larger than 256 KiB"),
    ("a: &a {<<: *a}", r"nested too deeply"),
    ("a: {[1]: 2}", r"a key must be a plain word"),
    ("a: {<<: 3}", r"<<: expected a mapping"),
    (
        "a: &a {x: 1}\n"
        + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n" for a, b in GROWING),
        r"more than 20000 values",
    ),
    (
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in GROWING),
        r"more than 20000 values",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_values(written, text, message):
    with pytest.raises(SettingError, match=f"--swap-config .*{message}"):
        read(written(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingError, match="none.yaml: cannot be read: No such file"):
        read(str(tmp_path / "none.yaml"))


def test_names_the_line(written):
    text = "swap_config:\n  swap: True\n  op_swap:\n    - op_name: mlp\n" \
           "      backward_prefetch: 2\n      layers:\n        - 7\n"  # fmt: skip
    with pytest.raises(SettingError, match=r"swap.yaml:7: swap_config.op_swap\[0\].layers\[0\]: layer 7"):
        read(written(text))
