"""A plan that was made from slower steps than those that follow is made again."""
from __future__ import annotations

from dataclasses import replace

import pytest
from steps import peak, run, settle
from test_phases import CAPACITY, TRACE, search

from mindspeed_swap.core.step import StepStats
from mindspeed_swap.smart_swap.lasting import FASTER_SHARE, MOST, STEPS, Lasting
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.peers import FASTER, Facts

TARGET = {"target_mode": True, "target_memory": CAPACITY}


def kept(tried_ms: float = 100.0) -> Lasting:
    lasting = Lasting()
    lasting.begin(tried_ms)
    return lasting


def told(lasting: Lasting, *steps_ms: float) -> bool:
    for step_ms in steps_ms:
        lasting.add(step_ms)
    return lasting.faster


@pytest.mark.parametrize("steps_ms, faster", [
    ([90.0] * STEPS, True),
    ([90.0] * (STEPS - 1), False),
    ([100.0 * (1 - FASTER_SHARE) + 0.1] * 3 * STEPS, False),
    ([130.0] * 3 * STEPS, False),  # that says nothing of the plan
    ([90.0, 400.0] + [90.0] * STEPS, True),  # an evaluation in between
    ([90.0, 130.0] * STEPS, False),
    ([130.0] * 40 + [90.0] * STEPS, True),
])  # fmt: skip
def test_the_median_of_some_steps_counts(steps_ms, faster):
    assert told(kept(), *steps_ms) is faster


def test_it_is_told_until_the_search_begins_and_a_few_times_at_most():
    lasting = Lasting()
    assert not lasting.watches and not told(lasting, *[1.0] * STEPS)  # of no plan
    for _ in range(MOST):
        lasting.begin(100.0)
        assert lasting.watches and told(lasting, *[90.0] * STEPS, 120.0, 120.0, 120.0)
        lasting.end(True)
        assert not lasting.watches and not lasting.faster
    lasting.begin(100.0)
    assert not lasting.watches and not told(lasting, *[1.0] * STEPS)


def test_a_search_for_another_reason_does_not_count():
    lasting = Lasting()
    for _ in range(MOST + 1):
        lasting.begin(100.0)
        lasting.end(False)
    lasting.begin(100.0)
    assert lasting.watches


def stable(**given):
    it = search(TARGET, 10 * peak(TRACE), settles=True, **given)
    lines = []
    it.tell = lines.append
    settle(it, TRACE, most=200)
    return it, lines


def test_the_search_begins_again_and_plans_from_the_faster_steps():
    it, lines = stable()
    before, tried_ms = it.plan, it.lasting._tried_ms
    assert tried_ms == pytest.approx(it.tries[it._kept_try].step_ms)
    points = [replace(point, time_ms=0.7 * point.time_ms) for point in TRACE.points]
    quick = replace(TRACE, points=points, step_ms=0.7 * TRACE.step_ms)
    for _ in range(STEPS):
        it.lasting.add(0.8 * tried_ms)
    for _ in range(3):
        run(it, quick)
    assert it.phase is Phase.SEARCH and "Stable -> SearchPolicy" in lines[-1] and lines[-1].endswith("become faster")
    assert it._changes == 0  # the workload has not
    settle(it, quick, most=200)
    assert it.plan != before and it.plan.prediction.step_ms < before.prediction.step_ms
    assert it.lasting.watches


@pytest.mark.parametrize("given", [{"pipelined": True}, {"settles": False}])
def test_where_no_step_is_timed_nothing_is_compared(given):
    it = search(TARGET, 10 * peak(TRACE), **{"settles": True} | given)
    settle(it, TRACE, most=200)
    assert it.phase is Phase.STABLE and not it.lasting.watches


def test_what_a_peer_saw_counts_as_well():
    it, lines = stable()
    facts = Facts(FASTER, 0, 0, 0, 0, 0)
    assert [it.judge(facts) for _ in range(2)] == [False, True]
    assert it.phase is Phase.SEARCH and lines[-1].endswith("become faster")
    assert it.lasting._searches == 1


def test_saves_of_another_number_are_a_change_of_the_workload():
    it, lines = stable()
    for _ in range(3):
        run(it, TRACE, StepStats(saves=2 * len(TRACE.saved)))
    assert lines[-1].endswith("the workload has changed") and it.lasting._searches == 0 and not it.lasting.watches
