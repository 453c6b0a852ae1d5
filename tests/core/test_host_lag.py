"""What recording took the host is taken out of a step's times where the device waited for it, and nowhere else."""
from itertools import pairwise

import pytest
from swapping import assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.core import module_calls, mover, recorder, swap_manager
from mindspeed_swap.core.host_lag import Mark, idle
from mindspeed_swap.core.simulate import plain_step_ms

AHEAD, LATENCY = 100.0, 0.008  # of the host's clock; of what is queued


def marks(*rows):
    """Rows: (host, recording, moving, what the device still had to do), all in ms."""
    return [
        Mark(AHEAD + host, recording, moving, device_ms=host + LATENCY + behind)
        for host, recording, moving, behind in rows
    ]


def test_where_the_queue_is_empty_all_of_it_is_idle_time():
    found = idle(marks((0, 3, 0, 0), (10, 4, 2, 0), (20, 1, 0, 0)), AHEAD)
    assert found.recording_ms == pytest.approx([0.0, 3.0, 7.0]) and found.moving_ms == pytest.approx([0.0, 0.0, 2.0])
    assert found.waits == [True, True, True]


def test_where_the_host_is_ahead_none_of_it_is():
    found = idle(marks((0, 3, 1, 50), (10, 3, 1, 60), (20, 3, 1, 70)), AHEAD)
    assert found.recording_ms == found.moving_ms == [0.0, 0.0, 0.0]
    assert found.waits == [False, False, False]


def test_only_what_goes_beyond_the_work_that_was_left():
    """That work hides moves first: they would be there without recording too."""
    found = idle(marks((0, 3, 2, 0), (10, 3, 2, 1), (20, 3, 2, 4), (30, 3, 2, 9), (40, 0, 0, 0)), AHEAD)
    assert found.moving_ms == pytest.approx([0.0, 2.0, 3.0, 3.0, 3.0])
    assert found.recording_ms == pytest.approx([0.0, 3.0, 6.0, 7.0, 7.0])
    assert found.waits == [False, False, False, False, True]


def test_no_more_than_the_interval_and_waits_for_copies_are_not_counted_twice():
    first, second = marks((0, 30, 0, 0), (10, 0, 0, 0))
    assert idle([first, second], AHEAD).recording_ms == pytest.approx([0.0, 10.0])
    second.stalled_ms = 7.0
    assert idle([first, second], AHEAD).recording_ms == pytest.approx([0.0, 3.0])


def test_a_clock_that_is_a_little_off_changes_nothing():
    rows = (0, 3, 0, 0), (10, 3, 0, 5), (20, 3, 0, 0)
    assert idle(marks(*rows), AHEAD + 0.02) == idle(marks(*rows), AHEAD)


def test_a_host_that_is_interrupted_while_it_queues_a_mark_is_late_there_and_nowhere_else():
    found = marks((0, 3, 0, 0), (10, 7, 0, 4), (20, 3, 0, 0))
    found[1].queueing_ms = 4.0
    assert idle(found, AHEAD) == ([0.0, 3.0, 6.0], [0.0, 0.0, 0.0], [True, True, True])


def test_no_marks():
    assert idle([], AHEAD) == ([], [], [])


def played(kernels, host, device, recording, sync):
    """(ms of the step, the marks): a host that queues ``kernels`` per point, and a device that runs them in their
    order. Every ``sync`` points the host waits for it."""
    now, busy, found = 0.0, 0.0, []
    head = 400 * recording  # kept busy, so that the host gets ahead
    busy = head
    for point in range(400):
        for _ in range(kernels):
            now += host
            busy = max(busy, now + LATENCY) + device
        busy = max(busy, now + LATENCY)
        found.append(Mark(AHEAD + now, recording, device_ms=busy))
        now += recording
        if sync and point % sync == sync - 1:
            now = max(now, busy) + 0.01
    return busy - head, found, head


@pytest.mark.parametrize("sync", [0, 12, 40])
@pytest.mark.parametrize(
    "kernels, host, device",
    [(3, 0.01, 0.025), (3, 0.01, 0.03), (1, 0.01, 0.06), (6, 0.008, 0.012), (3, 0.01, 0.005), (3, 0.02, 0.015)],
)
def test_the_step_is_as_long_as_it_is_unrecorded(kernels, host, device, sync):
    true_ms = played(kernels, host, device, 0.0, sync)[0]
    recorded_ms, found, head = played(kernels, host, device, 0.07, sync)
    corrected = recorded_ms - idle(found, AHEAD, head - found[0].host_ms + AHEAD).recording_ms[-1]
    told = f"{true_ms:.1f} ms, {recorded_ms:.1f} recorded"
    if not sync or device < host:
        assert corrected == pytest.approx(true_ms, rel=0.08), told
    else:  # the device waits for the host only because of recording, and for the first product after it too
        assert 0.95 * true_ms < corrected <= recorded_ms and corrected < 1.27 * true_ms, told


WORK_MS = 0.25  # between two points


class Clock:
    """Of the host and of the device, whose queue is empty whenever the host looks: it moves where it is told to. So the
    machine that runs this may take its time."""

    def __init__(self, sim, monkeypatch):
        self.ms, self._stamps, self.late, self._record = 1000.0, {}, {}, sim.record
        self.records = 0
        monkeypatch.setattr(sim, "record", self.record)
        manager = swap_manager.SwapManager
        monkeypatch.setattr(manager, "_close", self.slow(manager._close, WORK_MS))
        monkeypatch.setattr(sim, "elapsed_ms", lambda start, end: self._at(end) - self._at(start))
        for module in (recorder, mover, module_calls):
            monkeypatch.setattr(module, "perf_counter", lambda: self.ms / 1000)

    def _at(self, event):
        return self._stamps[id(event)][1]

    def record(self, stream):
        self.records += 1
        before, after = self.late.get(self.records, (0, 0))
        self.ms += before
        event = self._record(stream)
        self._stamps[id(event)] = event, self.ms  # and kept, so that no other has its id
        self.ms += after
        return event

    def slow(self, function, ms):
        def slow(*args):
            self.ms += ms
            return function(*args)

        return slow


@pytest.fixture
def clock(sim, monkeypatch):
    return Clock(sim, monkeypatch)


SLOW = {
    "the point": lambda patch, sim, clock: patch.setattr(recorder, "Point", clock.slow(recorder.Point, 20.0)),
    "the interval": lambda patch, sim, clock: patch.setattr(
        sim, "take_interval", clock.slow(sim.take_interval, 20.0)
    ),
    "the save": lambda patch, sim, clock: patch.setattr(
        recorder, "SavedRecord", clock.slow(recorder.SavedRecord, 20.0)
    ),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("what", SLOW)
def test_a_recorded_step_is_as_long_as_any_other(sim, clock, monkeypatch, planned, what):
    body, leaves = blocks(4, width=32)
    plain, manager = run_step(body, leaves), new_manager(sim)
    plan = recorded_plan(body, leaves, manager) if planned else None
    quick = run_step(body, leaves, manager, plan, record=True).trace
    SLOW[what](monkeypatch, sim, clock)
    recorded = run_step(body, leaves, manager, plan, record=True)
    trace = recorded.trace
    assert_same(recorded, plain)
    before_any_mark = 20.0 if what == "the interval" else 0.0
    assert trace.step_ms == pytest.approx(quick.step_ms + before_any_mark, abs=0.01) and len(trace.points) > 30
    assert trace.points[-1].time_ms <= trace.step_ms - trace.stall_ms + 1e-6
    assert all(one.time_ms <= other.time_ms + 1e-6 for one, other in pairwise(trace.points))
    assert all(p.waits_for_host for p in trace.points), "there, compute is the host"


def test_what_moves_take_the_host_is_in_the_step_and_in_no_time_of_a_point(sim, clock, monkeypatch):
    """And what keeps compute busy as a step begins, so that the host gets ahead, is for recording alone."""
    body, leaves = blocks(4, width=32)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    quick = run_step(body, leaves, manager, plan, record=True).trace
    quick_recording_ms = manager._recording_ms
    monkeypatch.setattr(sim, "copy", clock.slow(sim.copy, 10.0))
    trace = run_step(body, leaves, manager, plan, record=True).trace
    spent = 2 * 10.0 * len(plan.swaps)
    assert len(plan.swaps) > 4 and manager._recording_ms == pytest.approx(quick_recording_ms)
    assert trace.step_ms - quick.step_ms == pytest.approx(spent)
    assert trace.moving_ms - quick.moving_ms == pytest.approx(spent)
    assert plain_step_ms(trace) == pytest.approx(plain_step_ms(quick))
    assert trace.points[-1].time_ms == pytest.approx(quick.points[-1].time_ms)


@pytest.mark.parametrize("late", [(20.0, 0.0), (0.0, 20.0)])
@pytest.mark.parametrize("number", [3, 20, 35])
def test_a_mark_that_is_queued_late_makes_no_other_wrong(sim, clock, late, number):
    body, leaves = blocks(4, width=32)
    manager = new_manager(sim)
    quick = run_step(body, leaves, manager, record=True).trace
    clock.late[clock.records + number] = late
    trace = run_step(body, leaves, manager, record=True).trace
    assert all(p.waits_for_host for p in trace.points)
    assert quick.step_ms - 0.01 <= trace.step_ms <= quick.step_ms + 20.01


def test_a_look_at_the_clock_that_comes_late_is_not_the_only_one(sim, clock, monkeypatch):
    body, leaves = blocks(4, width=32)
    manager, synchronize, late = new_manager(sim), sim.synchronize, [True]

    def sometimes_late(event=None):
        synchronize(event)
        if event is not None and late:
            late.pop()
            clock.ms += 50

    monkeypatch.setattr(sim, "synchronize", sometimes_late)
    trace = run_step(body, leaves, manager, record=True).trace
    assert not late and all(p.waits_for_host for p in trace.points)


def test_a_load_that_pushes_others_out_counts_each_move_once(sim, clock, monkeypatch):
    """An allocation may evict, and that is a move of its own."""
    body, leaves = blocks(4, width=32)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    took = []
    began = recorder.Recorder.took_since

    def counted(self, start, *, moving=False):
        if moving:
            took.append(clock.ms / 1000 - start)
        began(self, start, moving=moving)

    monkeypatch.setattr(sim, "empty_strided", clock.slow(sim.empty_strided, 1000.0))
    monkeypatch.setattr(sim, "copy", clock.slow(sim.copy, 1.0))
    monkeypatch.setattr(recorder.Recorder, "took_since", counted)
    run_step(body, leaves, manager, plan, record=True)
    assert len(took) == 2 * len(plan.swaps) and sum(took) == pytest.approx(0.001 * len(took))
