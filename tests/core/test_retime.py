"""A recorded step is told as it is without recording, by what the same step took then."""
from dataclasses import replace

import pytest

from mindspeed_swap.core.lanes import MOVE_HOST_MS
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.retime import retimed
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.trace import (
    BACKWARD,
    FORWARD,
    CopyRecord,
    Key,
    ModuleKey,
    ModuleRecord,
    Point,
    Position,
    SavedRecord,
    StepTrace,
    WaitRecord,
)


def step(*intervals):
    """Intervals: (ms, whether the device waits for the host in it)."""
    trace, now = StepTrace("m", 0, 0, 1.0, 1.0), 0.0
    for number, (ms, waits) in enumerate([*intervals, (0.0, False)]):
        trace.points.append(Point(Position(FORWARD, 0, 0, 1, number), now, 0, 0, 0, 0, waits_for_host=waits))
        now += ms
    trace.step_ms = now + 5.0  # between steps
    return trace


def times(trace):
    return [point.time_ms for point in trace.points]


def test_what_is_too_much_is_taken_evenly_out_of_where_the_device_waits_for_the_host():
    trace = step((10, True), (10, False), (10, True), (10, False))
    trace = retimed(trace, 45.0 - 6.0)
    assert times(trace) == pytest.approx([0.0, 7.0, 17.0, 24.0, 34.0])
    assert trace.step_ms == pytest.approx(39.0)


def test_of_a_short_interval_some_is_left_and_the_others_give_more():
    trace = step((1, True), (10, True), (10, True))
    trace = retimed(trace, trace.step_ms - 6.8)
    assert times(trace) == pytest.approx([0.0, 0.2, 7.2, 14.2])


@pytest.mark.parametrize("intervals", [[(10, False), (10, False)], [(10, False)], [(0, True), (10, False)]])
def test_where_the_host_is_ahead_nothing_changes(intervals):
    trace = step(*intervals)
    before = times(trace), trace.step_ms
    assert retimed(trace, 1.0) is trace and (times(trace), trace.step_ms) == before


def test_a_step_that_was_no_longer_stays_as_it_is():
    trace = step((10, True), (10, True))
    before = times(trace), trace.step_ms
    for step_ms in (25.0, 30.0):
        trace = retimed(trace, step_ms)
        assert (times(trace), trace.step_ms) == before


def test_never_to_nothing():
    trace = step((10, True), (10, True))
    trace = retimed(trace, 0.0)
    assert times(trace) == pytest.approx([0.0, 2.0, 4.0])
    assert trace.step_ms == pytest.approx(9.0)


def test_copies_and_waits_move_with_the_points_and_last_as_long():
    trace = step((10, True), (10, False), (10, True), (10, False))
    key = Key(0, 0, 1, 0)
    trace.waits = [WaitRecord(key, 2, "w", 15.0, 19.0)]  # so points from number 2 on were reached 4 ms later
    trace.copies = [CopyRecord(key, 1, True, 3.0, 9.0), CopyRecord(key, 1, False, 12.0, 26.0)]
    for point in trace.points:
        point.position = point.position._replace(phase=BACKWARD)
    trace = retimed(trace, trace.step_ms - 6.0)
    assert [(copy.start_ms, copy.end_ms) for copy in trace.copies] == pytest.approx([(3.0, 9.0), (9.0, 23.0)])
    assert [(wait.start_ms, wait.end_ms) for wait in trace.waits] == pytest.approx([(12.0, 16.0)])


def test_what_a_module_takes_to_run_again_is_less_by_the_same_share_as_its_forward():
    trace = step((10, True), (10, False), (10, True), (10, False))

    def module(name, forward_ms, begin, end):
        return ModuleRecord(ModuleKey(0, 0, 1, name), forward_ms, begin, end, [], [])

    trace.modules = [
        module("whole", 20.0, 0, 2),  # 3 of its 20 ms are taken out
        module("part", 6.0, 0, 1),  # 3 of 10, and it need not run further than 6
        module("busy", 10.0, 1, 2),  # the device waited for nobody
        module("nothing", 0.0, 2, 2),
    ]
    trace = retimed(trace, trace.step_ms - 6.0)
    assert [module.forward_ms for module in trace.modules] == pytest.approx([17.0, 4.2, 10.0, 0.0])


def test_what_moves_were_expected_to_take_the_host_is_no_time_of_a_step_without_them():
    """So the plan that ran is told to take as long as it did, and a step without it less."""
    trace = step((10, True), (10, True), (10, False), (10, True), (10, False))
    key, at = Key(0, 0, 1, 0), [point.position for point in trace.points]
    trace.saved = [SavedRecord(key, 1, 0, 0, 0, 3, 5, True)]
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = 1000.0
    trace.forward_waits = 1.0
    plan = Plan("m", 0, (Swap(key, 1, at[1], at[2]),))
    plan = replace(plan, prediction=simulate(trace, plan).prediction)
    assert plan.prediction.host_ms == MOVE_HOST_MS
    seen_ms = 0.25 * MOVE_HOST_MS
    for point in trace.points[1:]:
        point.moving_ms = seen_ms
    again = retimed(trace, 50.0, MOVE_HOST_MS)
    assert again.step_ms == pytest.approx(50.0 - MOVE_HOST_MS + seen_ms)
    assert simulate(again, plan).step_ms == pytest.approx(50.0)
    assert simulate(again, Plan("m", 0)).step_ms == pytest.approx(50.0 - MOVE_HOST_MS)
    for point in trace.points[1:]:
        point.moving_ms = 2 * MOVE_HOST_MS  # more was seen than expected
    assert retimed(trace, 50.0, MOVE_HOST_MS).step_ms == pytest.approx(50.0)
