"""The simulator's rules, each on a case small enough to compute by hand. Times in ms, sizes in bytes."""
from __future__ import annotations

import pytest
from traces import Shape, megatron_trace, random_trace

from mindspeed_swap.core.lanes import MOVE_HOST_MS, Copy, Stall
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.trace import BACKWARD, FORWARD, Key, Point, Position, SavedRecord, StepTrace

BASE = 1000


def at(i: int) -> Position:
    return Position(FORWARD if i < 5 else BACKWARD, 0, 0, 1, i)


def key(number: int) -> Key:
    return Key(0, 0, 1, number)


def trace_of(*records: tuple[int, int, int, int], points: int = 10, d2h: float = 10.0, h2d: float = 10.0) -> StepTrace:
    """Points 10 ms apart, every interval needs BASE; records are (bytes, saved, first_read, died)."""
    saved = [
        SavedRecord(key(n), nbytes, s, s, s + 1, read, died, True) for n, (nbytes, s, read, died) in enumerate(records)
    ]
    rows = []
    for i in range(points):
        resident = sum(nbytes for nbytes, s, _, died in records if s < i < died)
        rows.append(Point(at(i), 10.0 * i, BASE + resident, BASE + resident, 0, resident))
    return StepTrace("toy", 10_000, BASE, d2h, h2d, 10.0 * (points - 1), points=rows, saved=saved)


def plan_of(trace: StepTrace, *swaps: tuple[int, int, int]) -> Plan:
    """Swaps are (record, release point, prefetch point)."""
    return Plan(
        "toy", 0, tuple(Swap(trace.saved[n].key, trace.saved[n].nbytes, at(out), at(back)) for n, out, back in swaps)
    )


def test_kept_tensor_is_resident_after_its_save_and_before_its_death() -> None:
    trace = trace_of((100, 1, 6, 8))
    assert [v - BASE for v in simulate(trace, plan_of(trace)).curve] == [0, 0, *[100] * 6, 0, 0]


def test_swapped_tensor_stays_through_release_and_returns_after_prefetch() -> None:
    trace = trace_of((100, 1, 6, 8))
    outcome = simulate(trace, plan_of(trace, (0, 3, 5)))
    assert [v - BASE for v in outcome.curve] == [0, 0, 100, 100, 0, 0, 100, 100, 0, 0]
    assert outcome.d2h == [Copy(key(0), 10.0, 20.0)] and outcome.h2d == [Copy(key(0), 50.0, 60.0)]
    assert outcome.stalls == [] and outcome.late_loads == [] and outcome.step_ms == 90.0
    assert outcome.peak_bytes == {FORWARD: BASE + 100, BACKWARD: BASE + 100}


def test_compute_waits_at_release_for_the_copy_out_and_everything_moves() -> None:
    trace = trace_of((250, 1, 6, 8))  # 25 ms out, from 10 to 35; release at 20
    outcome = simulate(trace, plan_of(trace, (0, 2, 3)))
    assert outcome.stalls == [Stall(key(0), 2, 15.0, "release")]
    assert outcome.h2d == [Copy(key(0), 45.0, 70.0)]  # point 3 is now at 45; the read at 60 + 15
    assert outcome.step_ms == 105.0 and outcome.stall_ms == 15.0 and outcome.late_loads == []


def test_compute_waits_at_the_read_for_the_copy_back() -> None:
    trace = trace_of((250, 1, 6, 8))
    outcome = simulate(trace, plan_of(trace, (0, 4, 5)))
    assert outcome.stalls == [Stall(key(0), 6, 15.0, "read")]
    assert outcome.late_loads == [key(0)] and outcome.step_ms == 105.0


def test_lanes_are_first_in_first_out_and_independent() -> None:
    trace = trace_of((150, 1, 8, 9), (100, 2, 7, 9), h2d=5.0)
    outcome = simulate(trace, plan_of(trace, (1, 4, 6), (0, 4, 6)))
    assert outcome.d2h == [Copy(key(0), 10.0, 25.0), Copy(key(1), 25.0, 35.0)]
    assert outcome.h2d == [Copy(key(1), 60.0, 80.0), Copy(key(0), 80.0, 110.0)]  # one point: the plan's order
    assert outcome.stalls == [Stall(key(1), 7, 10.0, "read"), Stall(key(0), 8, 20.0, "read")]
    assert outcome.step_ms == 120.0


def test_a_release_wait_gives_the_other_copies_time() -> None:
    trace = trace_of((300, 1, 8, 9), (100, 2, 7, 9))
    outcome = simulate(trace, plan_of(trace, (1, 5, 6), (0, 2, 3)))
    assert outcome.d2h == [Copy(key(0), 10.0, 40.0), Copy(key(1), 40.0, 50.0)]  # point 2 itself is now at 40
    assert [stall.point for stall in outcome.stalls] == [2] and outcome.stall_ms == 20.0


def test_release_frees_nothing_while_others_hold_the_storage() -> None:
    trace = trace_of((100, 1, 7, 9))
    trace.saved[0].sole = 4
    assert simulate(trace, plan_of(trace, (0, 2, 6))).curve[4:7] == [BASE + 100, BASE, BASE]
    trace.saved[0].sole = None
    assert simulate(trace, plan_of(trace, (0, 2, 6))).curve == simulate(trace, plan_of(trace)).curve


def test_a_prefetch_that_never_comes_is_a_load_on_demand() -> None:
    trace = trace_of((100, 1, 6, 8))
    outcome = simulate(trace, plan_of(trace, (0, 3, 2)))
    assert outcome.h2d == [Copy(key(0), 60.0, 70.0)] and outcome.late_loads == [key(0)]
    assert [v - BASE for v in outcome.curve][4:8] == [0, 0, 0, 100]


@pytest.mark.parametrize("shape", [Shape(), Shape(layers=3, microbatches=5, stages=3, stage=1)])
def test_keeping_everything_gives_what_was_recorded(shape: Shape) -> None:
    trace = megatron_trace(shape)
    outcome = simulate(trace, Plan(trace.model, 0))
    assert outcome.curve == [point.peak_bytes for point in trace.points]
    for phase, peak in outcome.peak_bytes.items():
        assert peak == max(point.peak_bytes for point in trace.points if point.position.phase == phase)
    assert set(outcome.peak_bytes) == {point.position.phase for point in trace.points}
    assert outcome.step_ms == trace.step_ms


def test_keeping_everything_gives_what_was_recorded_on_irregular_traces() -> None:
    for seed in range(50):
        trace = random_trace(seed)
        assert simulate(trace, Plan(trace.model, 0)).curve == [point.peak_bytes for point in trace.points]


def test_case_32_peak_elsewhere_is_seen_by_phase() -> None:
    trace = trace_of((100, 1, 4, 5))
    trace.points[8].peak_bytes += 5000
    kept, swapped = (simulate(trace, plan_of(trace, *swaps)).peak_bytes for swaps in ((), ((0, 2, 3),)))
    assert kept[BACKWARD] == swapped[BACKWARD] == BASE + 5000


def test_a_plan_of_another_trace_is_refused_by_its_first_difference() -> None:
    trace = trace_of((100, 1, 6, 8))
    good = plan_of(trace, (0, 3, 5)).swaps[0]
    for swap, message in [
        (Swap(key(7), 100, at(3), at(5)), "never saved"),
        (Swap(good.key, 99, at(3), at(5)), "99 bytes"),
        (Swap(good.key, 100, at(77), at(5)), "release of .* never met"),
        (Swap(good.key, 100, at(3), at(77)), "prefetch of .* never met"),
        (Swap(good.key, 100, at(1), at(5)), "before it is saved"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(trace, Plan("toy", 0, (swap,)))
    with pytest.raises(ValueError, match="twice"):
        simulate(trace, Plan("toy", 0, (good, good)))
    with pytest.raises(ValueError, match="another model: .other., the trace is .toy."):
        simulate(trace, Plan("other", 0))


def test_a_tensor_that_moves_takes_time_as_far_as_the_device_waits_for_the_host() -> None:
    """As it leaves for forward's share of such points, as it comes back for backward's."""
    trace = trace_of((100, 1, 6, 8), (100, 2, 7, 9))
    plan = plan_of(trace, (0, 3, 5), (1, 4, 5))
    assert simulate(trace, plan).step_ms == 90.0
    trace.forward_waits = 0.5
    outcome = simulate(trace, plan)
    assert outcome.step_ms == pytest.approx(90.0 + MOVE_HOST_MS) and outcome.stall_ms == 0.0
    assert outcome.prediction.host_ms == MOVE_HOST_MS
    assert [copy.start_ms for copy in outcome.d2h] == pytest.approx([10.0, 20.0 + MOVE_HOST_MS / 2])
    trace.backward_waits = 0.25
    assert simulate(trace, plan).step_ms == pytest.approx(90.0 + 1.5 * MOVE_HOST_MS)
    assert simulate(trace, plan_of(trace)).step_ms == 90.0
