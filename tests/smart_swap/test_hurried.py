"""Where the device waits for the host, a plan is made for a faster step than the recorded one, and told for that."""
from __future__ import annotations

from dataclasses import replace

import pytest
from traces import Shape, megatron_trace

from mindspeed_swap.core.plan import Plan, Prediction
from mindspeed_swap.core.retime import HURRY_SHARE, hurried, retimed
from mindspeed_swap.core.simulate import memory_curve, plain_step_ms, simulate
from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP, floor, solve, told_of
from mindspeed_swap.core.trace import FORWARD
from mindspeed_swap.report.what_if import frontier
from mindspeed_swap.smart_swap.outcomes import Try, promises_more
from mindspeed_swap.smart_swap.planning import make_plan
from mindspeed_swap.smart_swap.policy import Policy

SITES = (48.0, 48.0, 96.0, 96.0, *(4.0,) * 12)
MODULES = (("mlp", tuple(range(2, len(SITES))), (1,), 0.5), ("layer", tuple(range(1, len(SITES))), (0,), 1.0))
SHAPE = Shape(layers=12, sites_mib=SITES, modules=MODULES, layer_forward_ms=6.0, d2h_gbps=20.0, h2d_gbps=20.0)
DENSE = megatron_trace(SHAPE)
EXPERTS = replace(
    DENSE, forward_waits=0.3,
    points=[replace(point, waits_for_host=point.position.phase == FORWARD) for point in DENSE.points],
)  # fmt: skip


def budget(trace, share: float) -> int:
    low, high = floor(trace, ALL_VERBS).reachable_bytes, max(memory_curve(trace, ()))
    return low + int(share * (high - low))


def test_a_step_in_which_the_host_is_ahead_is_left_as_it_is():
    assert hurried(DENSE) is DENSE


def test_the_others_are_that_much_faster():
    assert plain_step_ms(hurried(EXPERTS)) == pytest.approx((1 - HURRY_SHARE) * plain_step_ms(EXPERTS))


@pytest.mark.parametrize("share", [0.75, 0.6, 0.45])
def test_in_a_faster_step_the_plan_is_better_and_in_the_recorded_one_not_much_worse(share):
    faster = retimed(EXPERTS, 0.88 * EXPERTS.step_ms)
    there = budget(EXPERTS, share)
    plan = told_of(EXPERTS, solve(hurried(EXPERTS), there, ALL_VERBS), ALL_VERBS)
    bold = solve(EXPERTS, there, ALL_VERBS)
    assert simulate(faster, plan).step_ms <= simulate(faster, bold).step_ms + 0.001 * plain_step_ms(EXPERTS)
    assert plan.prediction.step_ms <= 1.03 * bold.prediction.step_ms
    assert plan.prediction.peak <= there


def test_for_some_budget_it_is_much_better():
    faster = retimed(EXPERTS, 0.88 * EXPERTS.step_ms)
    gains = []
    for share in (0.75, 0.6, 0.45):
        plans = [solve(trace, budget(EXPERTS, share), ALL_VERBS) for trace in (hurried(EXPERTS), EXPERTS)]
        gains.append(simulate(faster, plans[1]).step_ms - simulate(faster, plans[0]).step_ms)
    assert max(gains) > 0.02 * plain_step_ms(faster), gains


@pytest.mark.parametrize("verbs", [KEEP_SWAP, ALL_VERBS])
def test_what_is_promised_is_of_the_recorded_step(verbs):
    policy = Policy(recomputes=verbs is ALL_VERBS)
    plan = make_plan(EXPERTS, policy, [budget(EXPERTS, 0.6)]).plan
    told = simulate(EXPERTS, plan).prediction
    assert replace(plan.prediction, faster_recompute_ms=None) == told
    if verbs is KEEP_SWAP:
        assert plan.prediction.faster_recompute_ms == solve(EXPERTS, plan.budget_bytes).prediction.faster_recompute_ms


def test_what_if_answers_with_the_plan_that_a_search_would_run():
    there = budget(EXPERTS, 0.6)
    (answers,) = frontier([EXPERTS], [there]).answers.values()
    for name, recomputes in (("keep|swap", False), ("+recompute", True)):
        plan = make_plan(EXPERTS, Policy(recomputes=recomputes), [there]).plan
        assert answers[name].step_ms == plan.prediction.step_ms and answers[name].swap_bytes == plan.swap_bytes


def test_what_ran_again_is_hurried_as_well():
    modules = [replace(module, again_ms=2.0) for module in EXPERTS.modules]
    quick = hurried(replace(EXPERTS, modules=modules))
    for module, before in zip(quick.modules, EXPERTS.modules, strict=True):
        assert module.again_ms == pytest.approx(2.0 * module.forward_ms / before.forward_ms)
    assert sum(module.again_ms for module in quick.modules) < 0.95 * 2.0 * len(modules)
    assert all(module.again_ms == 2.0 for module in modules)  # of the recorded step


def test_a_plan_that_promises_far_more_is_not_tried():
    def tried(step_ms: float) -> Try:
        plan = Plan("", 0, prediction=Prediction({}, step_ms, 0.0))
        return Try(plan, 0, 0, 1, step_ms, None)

    def following(promised_ms: float) -> Plan:
        return Plan("", 0, prediction=Prediction({}, promised_ms, 0.0))

    tries = [tried(150.0), tried(100.0)]
    assert promises_more(tries, following(90.0)) and promises_more(tries, following(120.0))
    assert not promises_more(tries, following(126.0)) and not promises_more(tries, following(360.0))
