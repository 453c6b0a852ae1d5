"""What recording took the host is taken out of a step's times where the device waited for it, and nowhere else."""
import time

import pytest
from swapping import assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.core import recorder
from mindspeed_swap.core.host_lag import Mark, idle_ms

AHEAD = 100.0  # of the host's clock


def marks(*rows, lag=0.01):
    """Rows: (host, recording before, recording after, device beyond the host), all in ms."""
    return [
        Mark(AHEAD + host, before, after, device_ms=host + lag + behind) for host, before, after, behind in rows
    ]


def test_where_the_queue_is_empty_all_of_it_is_idle_time():
    found = marks((0, 0, 1, 0), (10, 2, 1, 0), (20, 2, 1, 0))
    assert idle_ms(found, AHEAD) == [0.0, 3.0, 6.0]
    assert all(mark.empty for mark in found)


def test_where_the_host_is_ahead_none_of_it_is():
    found = marks((0, 0, 1, 50), (10, 2, 1, 60), (20, 2, 1, 70))
    assert idle_ms(found, AHEAD) == [0.0, 0.0, 0.0]
    assert not any(mark.empty for mark in found)


def test_where_the_host_is_ahead_at_one_end_the_other_end_counts():
    assert idle_ms(marks((0, 0, 1, 0), (10, 2, 1, 5), (20, 2, 1, 0)), AHEAD) == [0.0, 1.0, 3.0]


def test_no_more_than_the_interval_and_waits_for_copies_are_not_counted_twice():
    first, second = marks((0, 0, 8, 0), (10, 8, 0, 0))
    assert idle_ms([first, second], AHEAD) == [0.0, 10.0]
    second.stalled_ms = 7.0
    assert idle_ms([first, second], AHEAD) == [0.0, 3.0]


def test_no_marks():
    assert idle_ms([], AHEAD) == []


@pytest.mark.parametrize("planned", [False, True])
def test_a_recorded_step_is_as_long_as_any_other(sim, monkeypatch, planned):
    body, leaves = blocks(4, width=32)
    plain, manager = run_step(body, leaves), new_manager(sim)
    plan = recorded_plan(body, leaves, manager) if planned else None
    slow, point = 0.002, recorder.Point

    def slow_point(*args):
        time.sleep(slow)
        return point(*args)

    monkeypatch.setattr(recorder, "Point", slow_point)
    recorded = run_step(body, leaves, manager, plan, record=True)
    trace = recorded.trace
    assert_same(recorded, plain)
    spent = 1000 * slow * len(trace.points)
    assert trace.step_ms < 0.5 * spent and trace.points[-1].time_ms <= trace.step_ms - trace.stall_ms + 1e-6
    assert all(one.time_ms <= other.time_ms + 1e-6 for one, other in zip(trace.points, trace.points[1:], strict=False))
    assert all(p.waits_for_host for p in trace.points), "there, compute is the host"


def test_moves_are_told_apart_from_recording(sim, monkeypatch):
    """Both are in no time of the trace. But what keeps compute busy as a step begins, so that the host gets ahead, is
    for recording alone: the moves are in every step."""
    body, leaves = blocks(4, width=32)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    copy, slow = sim.copy, 0.01

    def slow_copy(*args):
        time.sleep(slow)
        copy(*args)

    monkeypatch.setattr(sim, "copy", slow_copy)
    trace = run_step(body, leaves, manager, plan, record=True).trace
    spent = 2 * 1000 * slow * len(plan.swaps)
    assert len(plan.swaps) > 4 and manager._recording_ms < 0.5 * spent
    assert trace.step_ms - trace.stall_ms < 0.5 * spent
