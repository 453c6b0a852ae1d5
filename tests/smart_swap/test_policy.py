"""Every knob that decides how much, and of what, on a recorded step: bytes are what the setting says."""
from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace

import pytest
from steps import peak
from traces import MIB, Shape, megatron_trace

from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.windows import windows
from mindspeed_swap.patches.arguments import add_arguments
from mindspeed_swap.smart_swap.planning import host_need, make_plan
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.stages import NO_LAYER, eligible, stages
from mindspeed_swap.units import GIB

SHAPE = Shape(layers=6, microbatches=2, sites_mib=(16, 32, 64, 24), transient_mib=32, static_mib=256, optimizer_mib=32)
TRACE = megatron_trace(SHAPE)
ALL = sum(window.nbytes for window in windows(TRACE))
MOVES_ALL = {"target_mode": True, "target_memory": 0}


def per_stage(plan, policy) -> dict:
    """Bytes that the plan moves of each stage."""
    of = dict(zip((r.key for r in TRACE.saved), stages(TRACE, policy), strict=True))
    moved: dict = defaultdict(int)
    for swap in plan.swaps:
        moved[of[swap.key]] += swap.nbytes
    return moved


def planned(settings: dict, capacity: int | None = None, trace=TRACE):
    policy = Policy.of(settings)
    budgets = sorted(set(policy.targets(capacity or 2 * peak(trace), peak(trace))))
    return make_plan(trace, policy, budgets)


@pytest.mark.parametrize("v2", [True, False])
def test_target_mode_with_target_0_moves_all(v2):
    plan = planned({**MOVES_ALL, "policy_v2": v2}).plan
    assert plan.swap_bytes == ALL
    assert max(plan.prediction.peak_bytes.values()) < peak(TRACE)


def test_moves_all_stays_within_the_device_where_it_can():
    trace = megatron_trace(replace(SHAPE, logits_mib=8))
    loose = planned(MOVES_ALL, trace=trace).plan
    tight = floor(trace).reachable_bytes
    plan = planned({**MOVES_ALL, "redundant_memory": 0}, tight, trace).plan
    assert len(plan.swaps) == len(loose.swaps) == len(windows(trace))
    assert max(plan.prediction.peak_bytes.values()) <= tight < max(loose.prediction.peak_bytes.values())


@pytest.mark.parametrize("bucket_mib", [0, 20, 80, 150])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_bytes_per_stage_are_what_the_setting_says(bucket_mib, layers):
    settings = {**MOVES_ALL, "swap_bucket_size": bucket_mib * MIB, "num_attn_layers_per_stage": layers}
    plan, policy = planned(settings).plan, Policy.of(settings)
    moved = per_stage(plan, policy)
    layer = sum(SHAPE.sites_mib) * MIB
    for (_, _, number), nbytes in moved.items():
        assert nbytes <= bucket_mib * MIB
        if number != NO_LAYER:  # filled as far as whole tensors go: the smallest one is what may be left
            members = min(layers, SHAPE.layers - number * layers)
            assert nbytes > min(bucket_mib * MIB, members * layer) - 32 * MIB
    assert len({stage for stage in moved if stage[2] != NO_LAYER}) == (
        0 if bucket_mib < 16 else SHAPE.microbatches * -(-SHAPE.layers // layers)
    )


def test_bucket_minus_1_is_no_cap_and_the_target_decides():
    capacity = (floor(TRACE).reachable_bytes + peak(TRACE)) // 2
    v2, v1 = planned({"swap_bucket_size": -1}, capacity).plan, planned({"policy_v2": False}, capacity).plan
    assert v2 == v1
    assert 0 < v2.swap_bytes < ALL
    assert max(v2.prediction.peak_bytes.values()) <= capacity


def test_buckets_are_of_v2_only():
    assert planned({**MOVES_ALL, "policy_v2": False, "swap_bucket_size": 0}).plan.swap_bytes == ALL
    assert planned({**MOVES_ALL, "swap_bucket_size": 0}).plan.swaps == ()


def test_a_bucket_too_small_for_the_target_is_named():
    capacity = (floor(TRACE).reachable_bytes + peak(TRACE)) // 2
    answer = planned({"swap_bucket_size": 17 * MIB}, capacity)
    assert answer.plan is None
    assert "infeasible: the floor is" in answer.text and "swap_bucket_size limit what may move" in answer.text


def test_tensor_size_filter():
    plan = planned({**MOVES_ALL, "tensor_size_filter": 30 * MIB}).plan
    assert {swap.nbytes for swap in plan.swaps} == {32 * MIB, 64 * MIB, 256 * MIB}


def test_stages_count_from_the_first_layer_of_a_pipeline_stage():
    shifted = replace(TRACE, saved=[
        replace(r, key=r.key._replace(layer=r.key.layer + 6) if r.key.layer else r.key) for r in TRACE.saved
    ])  # fmt: skip
    policy = Policy(layers_per_stage=4)
    assert stages(shifted, policy) == stages(TRACE, policy)


def test_bandwidths_given_are_planned_with():
    slow = eligible(TRACE, Policy.of({"D2H_bandwidth": 1000, "H2D_bandwidth": 2000}))
    assert slow.d2h_bytes_per_ms == pytest.approx(MIB) and slow.h2d_bytes_per_ms == pytest.approx(2 * MIB)
    capacity = (floor(TRACE).reachable_bytes + peak(TRACE)) // 2
    fast, crawling = planned({}, capacity).plan, planned({"D2H_bandwidth": 100, "H2D_bandwidth": 100}, capacity).plan
    assert crawling.prediction.step_ms > fast.prediction.step_ms


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, (9800, 10000)),
        ({"redundant_memory": 3000}, (7000, 7000)),
        ({"reduction_memory": 2000}, (5880, 6000)),
        ({"target_mode": True, "target_memory": 5000}, (4900, 5000)),
        ({"target_mode": True, "target_memory": 50000}, (9800, 10000)),
        ({"target_mode": True, "reduction_memory": 2000, "target_memory": 9000}, (8820, 9000)),
        ({"reduction_memory": 2000, "target_memory": 1000, "redundant_memory": 5000}, (5000, 5000)),
        ({"reduction_memory": 2000, "redundant_memory": 0}, (6000, 6000)),
    ],
)
def test_targets(settings, expected):
    """Device of 10000, step without swap 8000. (The second one is what must not be exceeded.)"""
    assert Policy.of(settings).targets(10000, 8000) == expected


def test_the_target_of_the_command_line_goes_before_the_file():
    policy = Policy.of({"reduction_memory": 7}).with_target(5000)
    assert policy.targets(10000, 8000) == (4900, 5000)
    assert Policy().with_target(0).moves_all


# ---- host memory
def test_case_29_budget_1_gib_plan_needs_4():
    trace = megatron_trace(Shape(layers=16, sites_mib=(64, 64, 128, 64), static_mib=256, transient_mib=64))
    policy = Policy.of(MOVES_ALL)
    need = host_need(make_plan(trace, policy, [peak(trace)]).plan)
    assert need > 4 * GIB
    answer = make_plan(trace, policy, [peak(trace)], 1 * GIB)
    assert GIB * 0.85 < host_need(answer.plan) <= GIB
    assert max(answer.plan.prediction.peak_bytes.values()) == simulate(trace, answer.plan).peak
    assert answer.text.count("\n") == 0
    assert "of host memory and 1.0 GiB are to be had: trimmed from" in answer.text
    assert f"--swap-host-memory {need / GIB / 0.95 + 0.005:.2f} would do" in answer.text
    assert make_plan(trace, policy, [peak(trace)], need).plan.swap_bytes > 4 * GIB


def test_a_trimmed_plan_that_misses_the_device_is_an_error_with_the_figure():
    budget = (floor(TRACE).reachable_bytes + peak(TRACE)) // 2
    answer = make_plan(TRACE, Policy(), [budget], 100 * MIB)
    assert answer.plan is None
    assert "infeasible: the floor is" in answer.text and "--swap-host-memory" in answer.text


@pytest.mark.parametrize("text", ["0", "0.0", " 0 ", "0e0"])
def test_a_target_of_nothing_in_any_spelling(text):
    parser = add_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--swap-memory-target", text]).swap_memory_target == 0.0


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e300", "x", ""])
def test_a_target_that_is_none(text, capsys):
    with pytest.raises(SystemExit):
        add_arguments(argparse.ArgumentParser()).parse_args(["--swap-memory-target", text])
    assert "expected a number of GB (1024^3 bytes) above 0" in capsys.readouterr().err
