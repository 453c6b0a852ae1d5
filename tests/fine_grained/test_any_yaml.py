"""Any configuration: it must run and do what it lists, or be one named error before anything starts."""
from __future__ import annotations

import functools
import json
import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_steps import Step, layer_names

from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.front_end import FineGrained
from mindspeed_swap.fine_grained.parts import WHOLE
from mindspeed_swap.fine_grained.planning import Planning
from mindspeed_swap.fine_grained.schema import read_swap_config
from mindspeed_swap.fine_grained.setlines import set_lines

LAYERS = 4
OPERATORS = {
    "attention": "self_attention", "self_attention": "self_attention", "feed_forward": "mlp", "mlp": "mlp",
    "attention.flash_attention": "self_attention.core_attention", "mlp.linear_fc2": "mlp.linear_fc2",
    "ffn_norm": "pre_mlp_layernorm", "attention.w_qkv": "self_attention.linear_qkv",
}  # fmt: skip
SETTINGS = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@functools.cache
def trace():
    return Step().trace()


def read(config) -> FineGrained:
    """As training begins. ``config``: a value, or text."""
    with tempfile.NamedTemporaryFile("wb", suffix=".yaml") as file:
        file.write(config if isinstance(config, bytes) else json.dumps(config).encode())  # JSON is YAML
        file.flush()
        fine = FineGrained(read_swap_config(file.name, LAYERS), 0)
    names = layer_names(trace())
    fine.meet([names], 0)
    return fine


numbers = st.integers(0, LAYERS - 1)
layer_lists = st.lists(numbers, min_size=1, max_size=4, unique=True)
values = st.integers(0, 30)


@st.composite
def nested(draw, found: list[int]):
    cut = draw(st.integers(0, len(found)))
    return draw(st.sampled_from([found, [found[:cut], found[cut:]]]))


@st.composite
def entries(draw, names=()):
    """Of one name no layer twice, and True alone."""
    found = []
    for name in names or [None]:
        free = list(range(LAYERS))
        if draw(st.integers(0, 4)) == 0:
            shares = [draw(st.booleans())]
        else:
            shares = []
            for _ in range(draw(st.integers(1, 3))):
                share = draw(st.lists(st.sampled_from(free), min_size=1, unique=True)) if free else []
                free = [n for n in free if n not in share]
                shares += [draw(nested(share))] if share else []
        for share in shares:
            entry = {"backward_prefetch": draw(values), "layers": share}
            found.append({"op_name": draw(st.sampled_from([name, [name]])), **entry} if name else entry)
    return found


@st.composite
def configs(draw, swap=None):
    """Valid ones."""
    swap = draw(st.booleans()) if swap is None else swap
    own = {"swap": swap}
    if draw(st.booleans()):
        own["default_prefetch"] = draw(values)
    if draw(st.booleans()):
        own["layer_swap"] = draw(st.none() | entries())
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=3, unique=True))
        own["op_swap"] = draw(st.none() | entries(names))
    config = {"swap_config": own}
    if draw(st.booleans()):
        share = layer_lists.flatmap(nested) if swap else st.integers(0, LAYERS).map(lambda n: [n])
        share = st.booleans() | share
        config["recompute_config"] = {
            "recompute": draw(share),
            "select_recompute": draw(st.just(False) | st.dictionaries(st.sampled_from(sorted(OPERATORS)), share)),
            "select_comm_recompute": False,
        }
    if draw(st.booleans()):
        config["model"] = {"model_config": {"num_layers": LAYERS}}
    if draw(st.booleans()):
        config["context"] = draw(st.sampled_from(["memory_optimize_level=O0", {"memory_optimize_level": "O1"}]))
    return config


def has(layers, layer: int) -> bool:
    if isinstance(layers, bool):
        return layers
    return any(layer in row if isinstance(row, list) else layer == row for row in layers)


def wanted(config, layer: int, inside: set[str]):
    """(value, part) that the list says for what is saved inside all of ``inside``, told by other means."""
    own = config["swap_config"]
    if not own["swap"]:
        return None
    ops, whole = own.get("op_swap"), own.get("layer_swap")
    if ops is None and whole is None:
        part = "self_attention.core_attention"
        return (own.get("default_prefetch", 1), part) if part in inside else None
    name_of = [entry["op_name"] if isinstance(entry["op_name"], str) else entry["op_name"][0] for entry in ops or []]
    for name in dict.fromkeys(name_of):
        for entry, own_name in zip(ops or [], name_of, strict=True):
            if own_name == name and has(entry["layers"], layer) and OPERATORS[name] in inside:
                return entry["backward_prefetch"], OPERATORS[name]
    return next(((e["backward_prefetch"], WHOLE) for e in whole or [] if has(e["layers"], layer)), None)


@SETTINGS
@given(configs())
def test_valid_ones_do_what_they_list_or_say_why_not(config):
    fine = read(config)
    parts = fine.parts
    planning = Planning(trace(), parts)
    placed = {p.record.key: p for p in planning.placed}
    for record in trace().saved:
        layer = record.key.layer - 1
        if layer < 0:
            continue
        inside = {m.key.name for m in trace().modules
                  if m.key[:3] == record.key[:3] and m.begin < record.saved < m.end}
        expected = wanted(config, layer, inside)
        swap = placed.get(record.key)
        if expected is None:
            assert swap is None
        elif swap is None:  # then a line says so
            assert any(line.startswith(f"layer {layer}: ") for line in planning.reasons)
        else:
            assert (swap.entry.value, swap.part) == expected
            assert record.last_use < swap.release < swap.prefetch < record.first_read
    assert {p.record.key for p in planning.placed}.isdisjoint(
        key for m in trace().modules for key in m.frees if m.key in {r.key for r in planning.plan.recomputes}
    )
    does = planning.plan.swaps or planning.plan.recomputes
    assert does or planning.reasons or any("nothing is swapped" in n or "no effect" in n for n in parts.config.notes)
    lines = set_lines(parts)
    assert lines == sorted(lines, key=lambda line: int(line.partition(" at layer ")[2].split()[0].rstrip(":")))


# ---- wrong ones: what is done to a valid one, and the key that the error must name
OWN = "swap_config"
bad_numbers = st.sampled_from([1.0, "1", None, {}, True])


def unknown_key(draw, config):
    section = draw(st.sampled_from(["swap_config", "recompute_config"]))
    config.setdefault(section, {})["ot_swap"] = 1
    return f"{section}.ot_swap: unknown"


def unknown_key_of_an_entry(draw, config):
    config[OWN]["layer_swap"] = [{"backward_prefetch": 1, "layers": [0], "layer": 1}]
    return "swap_config.layer_swap[0].layer: unknown"


def missing_key(draw, config):
    entry = {"backward_prefetch": 1, "layers": [0], "op_name": "mlp"}
    name = draw(st.sampled_from(sorted(entry)))
    del entry[name]
    config[OWN]["op_swap"] = [entry]
    return f"swap_config.op_swap[0].{name}: missing"


def bad_layer(draw, config):
    before = draw(st.lists(numbers, max_size=3))
    wrong = draw(bad_numbers | st.sampled_from([LAYERS, 99, -1, [0]] if before else [LAYERS, 99, -1]))
    config[OWN]["layer_swap"] = [{"backward_prefetch": 1, "layers": [*before, wrong]}]
    return f"swap_config.layer_swap[0].layers[{len(before)}]: "


def bad_layers(draw, config):
    config[OWN]["layer_swap"] = [
        {"backward_prefetch": 1, "layers": draw(st.sampled_from([0, 1.5, "all", {}, [], [[]]]))}
    ]
    return "swap_config.layer_swap[0].layers: "


def bad_value(draw, config):
    wrong = draw(st.sampled_from([1.5, "Auto", True, -1, []]))
    if draw(st.booleans()):
        config[OWN]["layer_swap"] = [{"backward_prefetch": wrong, "layers": [0]}]
        return "swap_config.layer_swap[0].backward_prefetch: expected a whole number"
    config[OWN]["default_prefetch"] = wrong
    return "swap_config.default_prefetch: expected a whole number"


def bad_list(draw, config):
    name = draw(st.sampled_from(["layer_swap", "op_swap"]))
    config[OWN][name] = draw(st.sampled_from([[], {}, True, 3, "mlp"]))
    return f"swap_config.{name}: expected a list"


def two_values_for_a_layer(draw, config):
    layer, value = draw(numbers), draw(values)
    config[OWN]["op_swap"] = [
        {"op_name": "mlp", "backward_prefetch": value, "layers": [layer]},
        {"op_name": ["attention", "mlp"], "backward_prefetch": value + 1, "layers": [layer]},
    ]
    return "swap_config.op_swap[1].backward_prefetch: Inconsistent 'backward_prefetch' values"


def all_layers_beside_another(draw, config):
    pair = [{"backward_prefetch": 2, "layers": True}, {"backward_prefetch": 2, "layers": draw(layer_lists)}]
    at = draw(st.integers(0, 1))
    config[OWN]["layer_swap"] = pair if at == 0 else pair[::-1]
    return f"swap_config.layer_swap[{at}].layers: True has all layers already"


def bad_op_name(draw, config):
    wrong = draw(st.sampled_from([3, "", "a(", "mlp.", "a..b", [], {}, ["mlp", 3], ["mlp", "("], True]))
    config[OWN]["op_swap"] = [{"op_name": wrong, "backward_prefetch": 1, "layers": [0]}]
    return "swap_config.op_swap[0].op_name"


def no_match(draw, config):
    config[OWN] = {"swap": True, "op_swap": [
        {"op_name": draw(st.sampled_from(["atention", "flash_attention", "mlp.linear_fc3", "layer"])),
         "backward_prefetch": 1, "layers": [0]}
    ]}  # fmt: skip
    config.pop("recompute_config", None)
    return "swap_config.op_swap[0]: "


def bad_swap(draw, config):
    config[OWN]["swap"] = draw(st.sampled_from([1, 0, "True", [], "on"]))
    return "swap_config.swap: expected True or False"


def other_number_of_layers(draw, config):
    config["model"] = {"model_config": {"num_layers": draw(st.sampled_from([LAYERS + 1, 0, 1, "4", 4.0, True]))}}
    return "model.model_config.num_layers: "


def bad_recompute(draw, config):
    swap = config[OWN]["swap"]
    wrong = draw(st.sampled_from([1, "all", 1.5, [99] if swap else [1, 1], [True], [1.5], {"mlp": 1}]))
    config["recompute_config"] = {"recompute": wrong}
    return "recompute_config.recompute"


def bad_select(draw, config):
    wrong = st.sampled_from([True, 1, "mlp", {"mlp": 1}, {"mlp": [1.5]}, {"(": True}])
    config["recompute_config"] = {"select_recompute": draw(wrong)}
    return "recompute_config.select_recompute"


def communication_without_sequence_parallel(draw, config):
    config["recompute_config"] = {"select_comm_recompute": True}
    return "recompute_config.select_comm_recompute: needs --sequence-parallel"


def no_section(draw, config):
    del config[OWN]
    return "swap_config: missing"


def not_a_section(draw, config):
    config[OWN] = draw(st.sampled_from([[], [1], "True", 3, True]))
    return "swap_config: expected keys"


BRANCHES = [
    unknown_key, unknown_key_of_an_entry, missing_key, bad_layer, bad_layers, bad_value, bad_list,
    two_values_for_a_layer, all_layers_beside_another, bad_op_name, no_match, bad_swap, other_number_of_layers,
    bad_recompute, bad_select, communication_without_sequence_parallel, no_section, not_a_section,
]  # fmt: skip


@SETTINGS
@given(st.data())
def test_wrong_ones_are_one_error_that_names_the_key(data):
    config = data.draw(configs())
    branch = data.draw(st.sampled_from(BRANCHES))
    key = branch(data.draw, config)
    try:
        read(config)
    except SettingError as error:
        assert key in str(error), f"{branch.__name__}: {error}"
        assert str(error).startswith("--swap-config ") and ".yaml:" in str(error)
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"{branch.__name__} was accepted: {config}")


@SETTINGS
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(str.encode)
    | st.text("[]{}:,-&*!|> \n\t'ab0", max_size=80).map(str.encode)
)
def test_anything_else_is_an_error_too(raw):
    try:
        read(raw)
    except SettingError as error:
        assert str(error).startswith("--swap-config ")
    else:
        raise AssertionError(f"accepted: {raw!r}")
