"""The figures of a step on traces small enough to check by hand."""
import pytest
from traces import Shape, megatron_trace

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import floor, solve
from mindspeed_swap.core.step import ExecutedStep, StepStats
from mindspeed_swap.core.trace import RECOMPUTED, CopyRecord, Key, StepTrace, WaitRecord
from mindspeed_swap.report.figures import figures, hidden_share

KEY = Key(0, 0, 1, 0)


def trace_of(copies, waits=()):
    trace = StepTrace("m", 0, 0, 1.0, 1.0)
    trace.copies = [CopyRecord(KEY, 8, i % 2 == 0, *span) for i, span in enumerate(copies)]
    trace.waits = [WaitRecord(KEY, 1, "USE_AFTER_LOAD", *span) for span in waits]
    return trace


@pytest.mark.parametrize(
    ("copies", "waits", "share"),
    [
        ([], [], None),
        ([(0, 10)], [], 1.0),
        ([(0, 10)], [(5, 10)], 0.5),
        ([(0, 10)], [(0, 4), (2, 5)], 0.5),  # waits of two threads at once count once
        ([(0, 10), (5, 15)], [(10, 15)], 2 / 3),  # the link was busy for 15 ms
        ([(0, 10), (20, 30)], [(12, 18)], 1.0),  # waiting while nothing was copied hides nothing less
        ([(0, 10), (20, 30)], [(8, 22)], 0.8),
    ],
)
def test_share_of_the_copies_time_that_is_hidden(copies, waits, share):
    assert hidden_share(trace_of(copies, waits)) == (None if share is None else pytest.approx(share))


def test_a_recompute_is_no_wait_for_a_copy():
    trace = trace_of([(0.0, 10.0)], [(1.0, 3.0)])
    trace.waits.append(WaitRecord(KEY, 1, RECOMPUTED, 4.0, 9.0))
    assert hidden_share(trace) == pytest.approx(0.8)


def test_measured_times_are_those_of_the_trace_with_the_waits_put_back():
    trace = megatron_trace(Shape(layers=2))
    plain = [point.time_ms for point in trace.points]
    assert trace.measured_ms() == plain
    waits = (3, 0.0, 2.0), (3, 2.0, 3.0), (7, 9.0, 10.0)
    trace.waits = [WaitRecord(KEY, point, "USE_AFTER_LOAD", start, end) for point, start, end in waits]
    found = [after - before for after, before in zip(trace.measured_ms(), plain, strict=True)]
    assert found == pytest.approx([0.0] * 3 + [3.0] * 4 + [4.0] * (len(plain) - 7))
    assert StepTrace.from_json(trace.to_json()) == trace


def test_predicted_beside_measured_and_what_went_where():
    trace = megatron_trace(Shape(layers=4, microbatches=2))
    plan = solve(trace, (floor(trace).reachable_bytes + trace.capacity_bytes) // 2)
    told = figures(ExecutedStep(plan, StepStats(late_loads=3), trace))
    assert told["step_ms"]["predicted"] == plan.prediction.step_ms
    for name, short in (("forward", "F"), ("backward", "B"), ("optimizer", "O")):
        peak = told["phases"][name]["peak_allocated_bytes"]
        assert peak["predicted"] == plan.prediction.peak_bytes[short]
        assert peak["without_plan"] == simulate(trace, Plan(trace.model, 0)).peak_bytes[short]
    assert told["counters"]["late_loads"] == 3
    layers = told["layers"]
    assert [row["layer"] for row in layers] == [0, 1, 2, 3, 4]
    assert sum(row["swapped_bytes"] for row in layers) == plan.swap_bytes > 0
    total = sum(sum(row[f"{where}_bytes"] for where in ("swapped", "kept", "immovable")) for row in layers)
    assert total == sum(record.nbytes for record in trace.saved)
    assert layers[1]["immovable_bytes"] == 2 * (8 << 20)  # of both microbatches
    assert sum(row["swapped_bytes"] for row in told["tensors"]) == plan.swap_bytes
    sizes = [sum(row[f"{where}_bytes"] for where in ("swapped", "kept", "immovable")) for row in told["tensors"]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_freed_nothing_is_a_note():
    trace = megatron_trace(Shape(layers=2))
    told = figures(ExecutedStep(Plan(trace.model, 0), StepStats(ineffective_bytes=3 << 20, host_full=2), trace))
    assert told["notes"] == [
        "swapping 3.0 MiB freed nothing: somebody else still held those tensors",
        "2 tensors stayed on the device because the host budget was used up",
    ]
