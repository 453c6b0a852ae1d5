"""The trace of a step: indices on a graph small enough to check by hand, and the residency convention of trace.py."""
import gc
import time

import pytest
import torch
from swapping import (
    assert_nothing_left,
    assert_same,
    blocks,
    capacity,
    new_manager,
    new_trace,
    plan_everything,
    recorded_plan,
    run_step,
)

from mindspeed_swap.core import step_clock
from mindspeed_swap.core.accelerator.sim import COMPUTE, SimAccelerator
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.trace import BACKWARD, ENTER, EXIT, FORWARD, OPTIMIZER, StepTrace
from mindspeed_swap.sim import device

SIZE = 32
BYTES = 4 * SIZE * SIZE


def record(body, leaves, manager, plan=None, **options) -> StepTrace:
    return run_step(body, leaves, manager, plan, record=True, **options).trace


def tiny(leaf):
    def body(layer):
        with layer(1):
            x = leaf * 2.0  # saves nothing of ours
            y = x.sin()  # saves x
            z = y * y.cos()  # saves y (for cos), then cos(y) and y
            del x, y
        with layer(2):
            return z.exp().sum()  # saves its output
    return body


def test_a_graph_checked_by_hand(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager = new_manager(sim)
    static = device.memory_allocated()
    trace = record(tiny(leaf), [leaf], manager)
    found = [(p.position.phase, p.position.layer, p.position.ordinal) for p in trace.points]
    assert found == [
        (FORWARD, 0, ENTER),  # 0
        (FORWARD, 1, ENTER),
        (FORWARD, 1, 0),  # 2: x
        (FORWARD, 1, 1),  # 3: y, for cos
        (FORWARD, 1, 2),  # 4: y's partner in the product, or y
        (FORWARD, 1, 3),  # 5
        (FORWARD, 1, EXIT),
        (FORWARD, 2, ENTER),
        (FORWARD, 2, 0),  # 8: exp
        (FORWARD, 2, EXIT),
        (FORWARD, 0, EXIT),  # 10
        (BACKWARD, 2, 0),  # 11: exp
        *found[12:14],  # 12, 13: the product reads both
        (BACKWARD, 1, 1),  # 14: cos
        (BACKWARD, 1, 0),  # 15: sin
        (OPTIMIZER, 0, EXIT),  # 16
    ]
    assert {point[2] for point in found[12:14]} == {2, 3}
    x, y, cos, exp = trace.saved
    assert [r.key.ordinal for r in (x, y, cos, exp)] == [0, 1, 2, 0] or [r.key.ordinal for r in (x, y, cos, exp)] == [
        0, 1, 3, 0,
    ]  # fmt: skip
    assert {r.nbytes for r in trace.saved} == {BYTES}
    assert all(r.movable for r in trace.saved)
    assert (x.saved, x.last_use, x.first_read, x.died) == (2, 2, 15, 16)
    assert (y.saved, y.last_use) == (3, 4 if cos.saved == 5 else 5)
    assert cos.saved in (4, 5) and {y.first_read, cos.first_read} == {12, 13}
    assert (exp.saved, exp.last_use, exp.first_read) == (8, 8, 11)
    # x and y are held by the body until it deletes them, between the last save in layer 1 and its exit.
    assert x.sole == y.sole == 6 and cos.sole in (5, 6)
    assert exp.sole == 9  # at the exit of its layer the output of exp has been given up: sum needs it no more
    assert trace.points[10].resident_bytes == 4 * BYTES
    assert trace.held_bytes == trace.points[10].allocated_bytes - static
    assert 4 * BYTES <= trace.held_bytes < 4 * BYTES + 1024  # and the loss
    assert trace.points[0].resident_bytes == 0 and trace.points[-1].resident_bytes == 0
    times = [point.time_ms for point in trace.points]
    assert times == sorted(times) and trace.step_ms >= times[-1]
    assert StepTrace.from_json(trace.to_json()) == trace


def test_why_a_record_cannot_be_moved(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    kept = []

    def body(layer):
        with layer(1):
            held = leaf * 2.0
            kept.append(held.detach())
            return held.sin().sum() + (leaf * 3.0).cos().sum()

    manager = new_manager(sim)
    trace = record(body, [leaf], manager)
    assert [r.reason for r in trace.saved] == ["held by others", ""]

    manager.begin_step(trace=StepTrace("", 0, 0, 1.0, 1.0))
    with manager.forward(0):
        read, unread = (leaf * 2.0).sin().sum(), (leaf * 2.0).sin().sum()
    read.backward(retain_graph=True)
    _, trace = manager.end_step()
    assert [r.reason for r in trace.saved] == ["outlives the step", "not read in backward"]
    del unread


def bases(trace: StepTrace) -> list[int]:
    return [trace.base_bytes(i) for i in range(len(trace.points))]


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("release", [0, 2])
def test_base_is_the_same_under_a_plan(sim, release, prefetch):
    """What an interval needs besides the resident tensors does not depend on which of them are resident."""
    gc.collect()  # of earlier tests
    body, leaves = blocks(4, width=64, tokens=64)
    manager = new_manager(sim)
    kept = record(body, leaves, manager)
    plan = recorded_plan(body, leaves, manager, release=release, prefetch=prefetch)
    swapped = record(body, leaves, manager, plan)
    assert [p.position for p in swapped.points] == [p.position for p in kept.points]
    assert max(p.resident_bytes for p in swapped.points) < max(p.resident_bytes for p in kept.points)
    assert bases(swapped) == bases(kept)
    assert swapped.saved == kept.saved


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_base_under_eviction(sim, share, hook):
    """Evicted inside an interval, a tensor counts as gone from all of it, although it was there until the request that
    pushed it out: base is then too high, by at most what was evicted there. Everywhere else it is the same, and so it
    is at every point where eviction is ahead, at the points themselves."""
    body, leaves = blocks(6, width=64, tokens=128)
    manager = new_manager(sim)
    plain = run_step(body, leaves)
    kept = record(body, leaves, manager)
    for leaf in leaves:
        leaf.grad = None
    base = device.memory_allocated()
    guard = OomGuard(manager, hook=hook)
    evicted_by_point: dict[int, int] = {}

    def note(saved, old):
        recorder = manager._mover.recorder
        if recorder is not None and saved.state.value == "host":
            index = len(recorder.trace.points)  # of the interval that is open
            evicted_by_point[index] = evicted_by_point.get(index, 0) + saved.nbytes

    manager.observers.append(note)
    with capacity(base + int((plain.peak_bytes - base) * share)):
        outcome = run_step(body, leaves, manager, record=True)
    guard.close()
    assert_same(outcome, plain)
    trace = outcome.trace
    assert trace.evicted_bytes > 0 and evicted_by_point
    assert [p.position for p in trace.points] == [p.position for p in kept.points]
    for index, (found, expected) in enumerate(zip(bases(trace), bases(kept), strict=True)):
        if not hook:
            assert found == expected, index
        assert expected <= found <= expected + evicted_by_point.get(index, 0), index


def test_recording_changes_nothing_and_ends_with_its_step(sim):
    body, leaves = blocks(3, width=32)
    manager = new_manager(sim)
    plain = run_step(body, leaves)
    assert_same(run_step(body, leaves, manager, record=True), plain)
    assert manager._mover.recorder is None
    outcome = run_step(body, leaves, manager)
    assert outcome.trace is None
    assert_same(outcome, plain)


def test_recording_has_a_head_start_that_no_time_shows(sim, monkeypatch):
    """As long as recording took the host in the step before that was recorded."""
    body, leaves = blocks(3, width=32)
    manager = new_manager(sim)
    given = []

    def occupy(ms: float) -> None:
        given.append(ms)
        time.sleep(0.2)  # the simulated device works in the host's time

    monkeypatch.setattr(sim, "occupy", occupy)
    for recorded in (True, False, True):
        outcome = run_step(body, leaves, manager, record=recorded)
    assert len(given) == 1 and 0.0 < given[0] < 1000.0
    assert 0.0 < outcome.trace.step_ms < 200.0
    times = [point.time_ms for point in outcome.trace.points]
    assert times == sorted(times) and times[-1] <= outcome.trace.step_ms


def test_a_step_lasts_from_the_end_of_the_one_before(sim, monkeypatch):
    """What the trainer does between two steps takes time in each. Now and then it does more (an evaluation), and after
    a step that was recorded we do. More than a share of the step is never taken for what it always does."""
    body, leaves = blocks(3, width=32)
    manager, elapsed_ms = new_manager(sim), sim.elapsed_ms
    minute = 60_000.0  # next to which the step is nothing

    def counted(minutes: int) -> int:
        """Minutes that a recorded step counts, where it begins so many after the one before."""
        ended = manager.clock._ended
        monkeypatch.setattr(
            sim, "elapsed_ms", lambda start, end: minutes * minute if start is ended else elapsed_ms(start, end)
        )
        trace = record(body, leaves, manager)
        return round((trace.step_ms - trace.stall_ms - trace.points[-1].time_ms) / minute)

    assert counted(5) == 0, "of the first step nothing is known"
    run_step(body, leaves, manager)
    assert counted(5) == 0, "minutes are no part of a step of milliseconds"
    monkeypatch.setattr(step_clock, "MOST_BETWEEN_SHARE", 1e9)
    for minutes, expected in ((3, 3), (9, 3), (2, 2), (4, 2)):
        run_step(body, leaves, manager)
        assert counted(minutes) == expected
        assert counted(1) == expected, "after a recorded step: as before"
    run_step(body, leaves, manager)
    assert round(manager.clock.step_ms() / minute) == 2, "of a step that is not recorded it is the same"


def test_tensors_of_an_earlier_step_belong_to_the_base(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager = new_manager(sim)
    manager.begin_step()
    with manager.forward(0):
        old = (leaf * 2.0).sin().sum()
    trace = record(tiny(leaf), [leaf], manager)
    assert len(trace.saved) == 4 and trace.points[1].resident_bytes == 0
    old.backward()


def test_recorded_times_are_free_of_waits_for_copies(sim):
    body, leaves = blocks(4, width=128, tokens=256)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    device.set_link(0.01, 0.01)
    copies_ms = plan.swap_bytes / 0.01e6
    trace = record(body, leaves, manager, plan)
    assert trace.stall_ms > copies_ms / 2  # out and back, and little to hide behind, however slow the machine is
    assert 0.0 < trace.points[-1].time_ms <= trace.step_ms - trace.stall_ms
    times = [point.time_ms for point in trace.points]
    assert times == sorted(times)


def test_copies_that_another_stream_waits_for_outlast_the_step(sim):
    """What was saved in a stream of the user's gives its memory up there; the step's end is in another one."""

    class Streams(SimAccelerator):
        now = COMPUTE

        def compute_stream(self):
            return self.now

    accelerator = Streams()
    manager, weight = new_manager(accelerator), torch.nn.Parameter(torch.randn(64, 64))
    device.set_link(0.001, 0.001)
    manager.begin_step(plan_everything(2, weight.nbytes), trace=new_trace())
    with manager.forward(0):
        accelerator.now = accelerator.new_stream()
        kept = torch.tanh(torch.tanh(torch.randn(64, 64) @ weight))
    accelerator.now = COMPUTE
    _, trace = manager.end_step()
    assert len(trace.copies) == len(trace.copy_waits) == 2
    assert all(copy.end_ms > copy.start_ms for copy in trace.copies)
    del kept
    assert_nothing_left(manager)
