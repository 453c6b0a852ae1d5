"""SmartSwap's phases on recorded steps: what it decides, and what it says."""
from __future__ import annotations

import pytest
from steps import executed
from traces import Shape, megatron_trace

from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.smart_swap.outcomes import NoPlan, Phase
from mindspeed_swap.smart_swap.policy import MAX_TRIES, Policy
from mindspeed_swap.smart_swap.search import SmartSwap

SHAPE = Shape(layers=4)


def peak(trace):
    return max(point.peak_bytes for point in trace.points)


def warmed_up(capacity, trace=None):
    """A SmartSwap that has seen its warm-up steps."""
    search = SmartSwap(capacity)
    first = megatron_trace(SHAPE)
    first.has_optimizer_state = False
    assert search.next_step().record
    assert not search.after_step(StepStats(), first)
    assert search.phase is Phase.WARM_UP, "the first step has no optimizer state: nothing may be planned from it"
    assert search.next_step().plan is None
    assert search.after_step(StepStats(), trace or megatron_trace(SHAPE))
    return search


def tried(search):
    """The step that runs the plan in force."""
    return executed(megatron_trace(SHAPE), search.plan)


def tight(trace):
    return (floor(trace).reachable_bytes + peak(trace)) // 2


def test_plans_from_the_first_step_that_started_with_optimizer_state(capsys):
    trace = megatron_trace(SHAPE)
    search = warmed_up(tight(trace))
    assert search.phase is Phase.SEARCH
    order = search.next_step()
    assert order.record
    assert order.plan is not None
    assert order.plan.swap_bytes >= peak(trace) - tight(trace)
    assert max(order.plan.prediction.peak_bytes.values()) <= tight(trace)
    line = capsys.readouterr().out.strip()
    assert line.startswith("[mindspeed_swap] smart-swap: WarmUp -> SearchPolicy at step 2, peak ")
    assert ", target " in line


def test_a_clean_try_becomes_stable_and_is_no_longer_recorded(capsys):
    search = warmed_up(tight(megatron_trace(SHAPE)))
    cautious = search.next_step().plan
    search.after_step(StepStats(), tried(search))
    less = search.next_step().plan  # as that one needed what was predicted, the next leaves less room
    assert less.swap_bytes < cautious.swap_bytes
    search.after_step(StepStats(), tried(search))
    assert search.phase is Phase.STABLE
    order = search.next_step()
    assert order.plan in (cautious, less)
    assert not order.record
    assert "SearchPolicy -> Stable at step 4" in capsys.readouterr().out


def test_what_eviction_needs_last_comes_from_the_recorded_order():
    trace = megatron_trace(SHAPE)
    order = warmed_up(tight(trace)).next_step().read_order
    first_layer = [order[r.key] for r in trace.saved if r.key.layer == 1 and r.key in order]
    last_layer = [order[r.key] for r in trace.saved if r.key.layer == SHAPE.layers and r.key in order]
    assert min(first_layer) > max(last_layer)


def test_everything_fits_is_one_line_and_no_plan(capsys):
    trace = megatron_trace(SHAPE)
    search = warmed_up(2 * peak(trace))
    assert search.phase is Phase.STABLE
    assert search.plan.swaps == ()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "everything fits" in out


def test_where_all_is_to_move_and_nothing_can_nothing_is_said_to_fit(capsys):
    trace = megatron_trace(SHAPE)
    search = SmartSwap(2 * peak(trace), Policy().with_target(0), host_bytes=0)
    for _ in range(2):
        search.after_step(StepStats(), trace)
    assert search.phase is Phase.STABLE and search.plan.swaps == ()
    assert "nothing can be moved" in capsys.readouterr().out


def test_case_34_a_plan_of_zero_bytes_above_the_target_is_an_error():
    trace = megatron_trace(SHAPE)
    for record in trace.saved:
        record.movable, record.reason = False, "held by others"
    with pytest.raises(NoPlan, match="infeasible: the floor is .*, reached in phase"):
        warmed_up(int(peak(trace) * 0.9), trace)


def test_a_try_in_trouble_leaves_more_room_next_time():
    trace = megatron_trace(SHAPE)
    search = warmed_up(tight(trace))
    first = search.next_step().plan
    search.after_step(StepStats(evictions=1, evicted_bytes=64 << 20), tried(search))
    second = search.next_step().plan
    assert search.phase is Phase.SEARCH
    assert second.swap_bytes > first.swap_bytes
    reserve = search.capacity_bytes - first.budget_bytes
    assert second.budget_bytes == first.budget_bytes - reserve


def test_the_best_measured_try_is_kept_not_the_last(capsys):
    search = warmed_up(tight(megatron_trace(SHAPE)))
    plans = []
    for number, trouble in enumerate([1] * MAX_TRIES):
        if search.phase is not Phase.SEARCH:
            break
        plans.append(search.next_step().plan)
        trace = tried(search)
        trace.step_ms = 100.0 if number == 0 else 500.0
        search.after_step(StepStats(evictions=trouble), trace)
    assert len(plans) >= 2
    assert search.phase is Phase.STABLE
    assert search.plan is plans[0]


def test_two_bad_steps_in_a_row_go_back_to_the_search_one_does_not():
    search = warmed_up(tight(megatron_trace(SHAPE)))
    while search.phase is Phase.SEARCH:
        search.after_step(StepStats(), tried(search))
    bad = StepStats(on_demand_loads=3, evictions=1)
    search.after_step(bad, None)
    search.after_step(StepStats(), None)
    search.after_step(bad, None)
    assert search.phase is Phase.STABLE
    search.after_step(bad, None)
    assert search.phase is Phase.SEARCH
    assert search.next_step().record
    assert search.stable.on_demand_loads == 9


def test_trouble_that_no_plan_avoided_is_no_drift():
    search = warmed_up(tight(megatron_trace(SHAPE)))
    for _ in range(MAX_TRIES):
        if search.phase is Phase.SEARCH:
            search.after_step(StepStats(evictions=3), tried(search))
    assert search.phase is Phase.STABLE
    for _ in range(5):
        search.after_step(StepStats(evictions=3), None)
    assert search.phase is Phase.STABLE
    search.after_step(StepStats(evictions=9), None)
    search.after_step(StepStats(evictions=9), None)
    assert search.phase is Phase.SEARCH


def test_without_the_reserve_is_better_than_not_at_all():
    trace = megatron_trace(SHAPE)
    capacity = int(floor(trace).reachable_bytes * 1.005)
    search = warmed_up(capacity)
    assert search.phase is Phase.SEARCH
    assert max(search.plan.prediction.peak_bytes.values()) <= capacity


def test_steps_that_save_more_and_less_leave_room_for_the_most():
    trace = megatron_trace(SHAPE)
    spread = (tight(trace) - floor(trace).reachable_bytes) // 2
    search = SmartSwap(tight(trace))
    first = megatron_trace(SHAPE)
    first.has_optimizer_state = False
    search.after_step(StepStats(most_saved_bytes=1000 + spread), first)
    search.after_step(StepStats(most_saved_bytes=1000), trace)
    assert search.phase is Phase.SEARCH
    assert search.target_bytes == tight(trace) - spread
    assert max(search.plan.prediction.peak_bytes.values()) <= tight(trace) - spread


def test_capacity_that_grows_after_the_first_plan_is_used():
    """As after a first step that left room to others, of a run that goes on with optimizer state."""
    trace = megatron_trace(SHAPE)
    search = SmartSwap(int(0.8 * peak(trace)), Policy(warmup_step=1))
    search.after_step(StepStats(), trace)
    assert search.phase is Phase.SEARCH and search.plan.swap_bytes > 0
    search.capacity_bytes = int(1.05 * peak(trace))
    while search.phase is not Phase.STABLE:
        search.after_step(StepStats(), tried(search))
    assert search.plan.swap_bytes == 0


def test_what_one_plan_was_forgiven_the_next_is_not():
    """A plan with evictions was the best to be had; then there is room for everything, and evictions are a change."""
    trace = megatron_trace(SHAPE)
    search = warmed_up(tight(trace))

    def steps(count, evictions):
        for _ in range(count):
            order = search.next_step()
            search.after_step(StepStats(evictions=evictions), tried(search) if order.record else None)

    while search.phase is not Phase.STABLE:
        steps(1, 3)
    steps(10, 3)
    assert search.phase is Phase.STABLE, "no more than it was when it was tried"
    search.capacity_bytes = 2 * peak(trace)
    while search.phase is Phase.STABLE:
        steps(1, 4)
    steps(1, 0)
    assert search.phase is Phase.STABLE and not search.plan.text
    steps(4, 3)
    assert search.phase is Phase.SEARCH
