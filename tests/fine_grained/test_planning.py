"""What of a recorded step a setting moves, and when."""
from __future__ import annotations

from collections import defaultdict

import pytest
from layer_steps import OPERATORS, Step, layer_names
from traces import MIB

from mindspeed_swap.core.trace import BACKWARD, FORWARD, StepTrace
from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.operators import leaves, operators
from mindspeed_swap.fine_grained.parts import WHOLE, Parts
from mindspeed_swap.fine_grained.planning import Planning
from mindspeed_swap.fine_grained.schema import read_swap_config


@pytest.fixture
def plan(tmp_path):
    def make(text: str, step: Step | None = None, stages: int = 1, stage: int = 0):
        step = step or Step()
        path = tmp_path / "swap.yaml"
        path.write_text(text)
        layers = 1 + max(max(chunk) for chunk in step.chunks)
        trace = step.trace()
        config = read_swap_config(str(path), max(4, layers), stages, len(step.chunks))
        parts = Parts(config, layer_names(trace), step.chunks, stage)
        parts.must_match()
        return trace, Planning(trace, parts)

    return make


def moved(planned) -> dict[int, dict[str, float]]:
    """MiB by layer and part, as the plan moves them in one microbatch."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for swap in planned.placed:
        if swap.record.key.microbatch == 0:
            found[swap.record.key.layer - 1][swap.part] += swap.record.nbytes / MIB
    return {layer: dict(parts) for layer, parts in found.items()}


def calls(trace: StepTrace, layer: int) -> dict[str, tuple[int, int]]:
    """Begin and end of the leaves of a layer, by the end of their names."""
    return {trace.modules[i].key.name.rpartition(".")[2]: (trace.modules[i].begin, trace.modules[i].end)
            for i in leaves(trace) if trace.modules[i].key.layer == layer + 1}


def test_operators_are_the_leaves_in_the_order_of_the_step():
    trace = Step(((0, 1),)).trace()
    found = operators(trace)
    assert len(found.begins) == 2 * 2 * len(OPERATORS)
    forward = [call[0] for layer in (0, 1) for call in calls(trace, layer).values()]
    assert found.begins[: len(forward)] == forward
    assert list(calls(trace, 0)) == list(OPERATORS)
    assert found.begins == sorted(found.begins)
    assert all(begin <= end for begin, end in zip(found.begins, found.ends, strict=True))


def test_default_moves_attention_of_all_layers(plan):
    _, planned = plan("swap_config: {swap: True}")
    # The output is saved once, with the attention that makes it; its input is another's.
    assert moved(planned) == {layer: {"self_attention.core_attention": 4.0} for layer in range(4)}
    assert planned.reasons == []


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_units_of_the_default(plan, value):
    """Released so many operators after the last forward use, prefetched so many before the first backward use."""
    step = Step()
    trace, planned = plan(f"swap_config: {{swap: True, default_prefetch: {value}}}", step)
    q = next(p for p in planned.placed if p.record.key == step.keys[0, 1, "q"])
    at = list(OPERATORS).index("core_attention")
    layer = calls(trace, 1)
    if value:
        assert q.release == layer[OPERATORS[at + value]][1]
        reader = {p.position[1:]: i for i, p in enumerate(trace.points) if p.position.phase == BACKWARD}
        saves = [p.position for p in trace.points[slice(*layer[OPERATORS[at + value]])]
                 if p.position.phase == FORWARD and p.position.ordinal >= 0]
        assert q.prefetch == min(reader[save[1:]] for save in saves)
    else:
        assert q.release == max(q.record.last_use, q.record.sole - 1) + 1
        assert q.prefetch == q.read - 1


def test_listed_ones_are_released_after_one_operator_whatever_their_value(plan):
    found = {}
    for value in (1, 5):
        _, planned = plan(
            f"swap_config: {{swap: True, op_swap: [{{op_name: attention, backward_prefetch: {value}, layers: [0]}}]}}"
        )
        found[value] = {p.record.key: (p.release, p.prefetch) for p in planned.placed}
    assert found[1].keys() == found[5].keys()
    for key, (release, prefetch) in found[1].items():
        assert found[5][key][0] == release
        assert found[5][key][1] < prefetch


def test_input_of_a_layer_stays_until_the_layer_has_returned(plan):
    step = Step()
    trace, planned = plan("swap_config: {swap: True, layer_swap: [{backward_prefetch: 3, layers: [1]}]}", step)
    first = next(p for p in planned.placed if p.record.key == step.keys[0, 1, "x0"])
    border = next(i for i, p in enumerate(trace.points) if p.position == ("F", 0, 0, 2, -2))
    assert first.release > border
    others = [p.release for p in planned.placed if p.record.key != first.record.key]
    assert min(others) < border
    assert moved(planned) == {1: {WHOLE: 14.0}}


def test_first_match_wins_and_operators_come_before_their_layer(plan):
    text = """
swap_config:
  swap: True
  layer_swap:
    - {backward_prefetch: 3, layers: [0]}
  op_swap:
    - {op_name: attention.flash_attention, backward_prefetch: 2, layers: [0]}
    - {op_name: [attention, 'mlp'], backward_prefetch: 4, layers: True}
"""
    _, planned = plan(text)
    values = {(p.record.key.layer - 1, p.part): p.entry.value for p in planned.placed}
    assert values[0, "self_attention.core_attention"] == 2
    assert values[0, "self_attention"] == 4
    assert values[0, WHOLE] == 3
    assert (1, WHOLE) not in values
    assert values[1, "self_attention"] == 4


def test_recompute_wins_on_the_same_operator(plan):
    text = """
recompute_config: {select_recompute: {feed_forward: [0, 3]}}
swap_config:
  swap: True
  op_swap:
    - {op_name: feed_forward, backward_prefetch: 4, layers: [0, 1]}
    - {op_name: attention, backward_prefetch: 4, layers: [0]}
"""
    _, planned = plan(text)
    assert moved(planned) == {0: {"self_attention": 5.0}, 1: {"mlp": 7.0}}
    assert [(r.key.layer, r.key.name) for r in planned.plan.recomputes] == [(1, "mlp"), (4, "mlp")]
    assert planned.reasons == ["layer 0: mlp (7.0 MiB): recomputed, so not swapped"]
    assert planned.plan.prediction is not None


def test_two_recomputed_ones_may_free_the_same(plan):
    """What one makes and the other, which gets it past its arguments, saves."""

    class Shared(Step):
        def trace(self):
            trace = super().trace()
            of = {module.key[2:]: module for module in trace.modules}
            of[1, "pre_mlp_layernorm"].frees.append(of[1, "mlp"].frees[0])
            return trace

    text = """
recompute_config: {select_recompute: {ffn_norm: True, feed_forward: True}}
swap_config: {swap: False}
"""
    _, planned = plan(text, Shared())
    assert {r.key.name for r in planned.plan.recomputes} == {"pre_mlp_layernorm", "mlp"}
    assert planned.plan.prediction is None


def test_an_operator_whose_output_a_recomputed_one_runs_from_is_not_swapped(plan):
    text = """
recompute_config: {select_recompute: {feed_forward: [0]}}
swap_config:
  swap: True
  op_swap: [{op_name: [ffn_norm, attention], backward_prefetch: 2, layers: [0, 1]}]
"""
    _, planned = plan(text)
    # What the norm gives is what feed_forward is run from.
    assert moved(planned) == {0: {"self_attention": 5.0}, 1: {"self_attention": 5.0, "pre_mlp_layernorm": 1.0}}
    assert planned.reasons == [
        "layer 0: pre_mlp_layernorm (1.0 MiB): a recomputed operator runs from its output, so not swapped"
    ]


def test_rule_two_looks_at_the_operator_not_at_what_the_setting_names(plan):
    text = """
recompute_config: {select_recompute: {attention.flash_attention: [1]}}
swap_config:
  swap: True
  op_swap: [{op_name: attention, backward_prefetch: 2, layers: [0, 1]}]
"""
    _, planned = plan(text)
    # core_attention is run again from what linear_qkv gives, so what linear_qkv saved stays.
    assert moved(planned) == {0: {"self_attention": 5.0}}
    assert planned.reasons == [
        "layer 1: self_attention (4.0 MiB): recomputed, so not swapped",
        "layer 1: self_attention.linear_qkv (1.0 MiB): a recomputed operator runs from its output, so not swapped",
    ]


def test_whole_layers(plan):
    _, planned = plan("recompute_config: {recompute: [1]}\nswap_config: {swap: True, default_prefetch: 2}")
    assert sorted(moved(planned)) == [0, 2, 3]
    assert [(r.key.layer, r.key.name) for r in planned.plan.recomputes] == [(2, "layer")]
    assert planned.reasons == ["layer 1: self_attention.core_attention (4.0 MiB): recomputed, so not swapped"]


def test_of_modules_inside_one_another_the_outermost_is_recomputed(plan):
    text = "recompute_config: {select_recompute: {attention: True, attention.flash_attention: [0]}}\n" \
           "swap_config: {swap: True}"  # fmt: skip
    _, planned = plan(text)
    assert [(r.key.layer, r.key.name) for r in planned.plan.recomputes] == [(n, "self_attention") for n in (1, 2, 3, 4)]
    assert planned.plan.swaps == ()


def test_too_large_a_value_says_what_would_do(plan):
    text = "swap_config: {swap: True, op_swap: [{op_name: attention, backward_prefetch: 50, layers: [2, 3]}]}"
    _, planned = plan(text)
    assert planned.plan.swaps == ()
    line = next(line for line in planned.reasons if line.startswith("layer 3"))
    most = int(line.split("at most ")[1].split()[0])
    for value, bytes_moved in ((most, 5.0), (most + 1, None)):
        _, planned = plan(text.replace("50", str(value)))
        assert moved(planned).get(3, {}).get("self_attention") == bytes_moved or bytes_moved is None
        assert bool([r for r in planned.reasons if r.startswith("layer 3")]) == (bytes_moved is None)


def test_larger_values_are_released_later_and_prefetched_earlier_and_peaks_rise(plan):
    peaks, swaps = [], []
    for value in (1, 10, 50):
        step = Step((tuple(range(12)),), gbps=1.0)
        _, planned = plan(f"swap_config: {{swap: True, default_prefetch: {value}}}", step)
        swaps.append({p.record.key: (p.release, p.prefetch) for p in planned.placed})
        peaks.append(max(planned.plan.prediction.peak_bytes.values()))
    for smaller, larger in zip(swaps, swaps[1:], strict=False):
        common = smaller.keys() & larger.keys()
        assert common
        assert all(larger[k][0] > smaller[k][0] and larger[k][1] < smaller[k][1] for k in common)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_case_19_only_the_layers_that_are_named(plan):
    text = "swap_config: {swap: True, op_swap: [{op_name: attention, backward_prefetch: 3, layers: [0, 6, 13]}]}"
    _, planned = plan(text, Step((tuple(range(32)),)))
    assert moved(planned) == {n: {"self_attention": 5.0} for n in (0, 6, 13)}


def test_global_numbers_on_a_stage_with_two_chunks(plan):
    text = """
recompute_config: {recompute: [7]}
swap_config: {swap: True, layer_swap: [{backward_prefetch: 2, layers: [[0, 1, 4], [2, 3, 6]]}]}
"""
    second = Step(chunks=((2, 3), (6, 7)), microbatches=2)
    _, planned = plan(text, second, stages=2, stage=1)
    assert sorted(moved(planned)) == [2, 3, 6]
    assert {(r.key.chunk, r.key.layer) for r in planned.plan.recomputes} == {(1, 8)}


def test_recompute_without_swap_counts_layers_of_each_stage(plan):
    second = Step(chunks=((2, 3), (6, 7)))

    def layers(value: str) -> set[int]:
        _, planned = plan(f"recompute_config: {{recompute: {value}}}\nswap_config: {{swap: False}}", second, 2, 1)
        return {r.key.layer - 1 for r in planned.plan.recomputes}

    assert layers("True") == {2, 3, 6, 7}
    assert layers("[2, 1]") == {2}
    assert layers("[0, 3]") == {2, 6, 3}  # in turn from each chunk
    assert layers("[[0, 0], [2, 1]]") == {6}


def test_a_pattern_that_matches_nothing_names_what_is_near(plan):
    with pytest.raises(SettingError, match=r"swap.yaml:1: swap_config.op_swap\[0\]: atention: .*near it: attention"):
        plan("swap_config: {swap: True, op_swap: [{op_name: atention, backward_prefetch: 3, layers: [0]}]}")
    with pytest.raises(SettingError, match=r"select_recompute.mlp.linear_fc3: .*mlp.linear_fc1"):
        plan("recompute_config: {select_recompute: {mlp.linear_fc3: True}}\nswap_config: {swap: True}")


def test_what_others_hold_is_not_moved_and_said(plan, monkeypatch):
    step = Step()
    trace = step.trace()
    for record in trace.saved:
        if record.key == step.keys[0, 0, "h2"]:
            record.movable, record.sole, record.reason = False, None, "held by others"
    monkeypatch.setattr(step, "trace", lambda: trace)
    _, planned = plan(
        "swap_config: {swap: True, op_swap: [{op_name: feed_forward, backward_prefetch: 3, layers: [0]}]}", step
    )
    assert moved(planned) == {0: {"mlp": 6.0}}
    assert planned.reasons == ["layer 0: mlp (1.0 MiB): cannot be moved (held by others)"]
