"""The third verb: what simulate says of it by hand, which modules a trace offers, host budget, links used both ways."""
from __future__ import annotations

import pytest
from test_simulate import BASE, key, plan_of, trace_of
from traces import LLAMA_MODULES, MIB, Shape, megatron_trace

from mindspeed_swap.core.lanes import Copy
from mindspeed_swap.core.plan import Plan, Recompute
from mindspeed_swap.core.recompute import (
    CALL_HOST_MS,
    DROP_HOST_MS,
    WHOLE_LAYER,
    as_they_run,
    full_recompute,
    modules_of,
)
from mindspeed_swap.core.simulate import memory_curve, simulate
from mindspeed_swap.core.solve import ALL_VERBS, Infeasible, _full_recompute, _Solver, floor, solve
from mindspeed_swap.core.trace import ModuleKey, ModuleRecord, StepTrace

NAME = ModuleKey(0, 0, 1, "mlp")


def toy() -> StepTrace:
    """Record 0 (its input) is saved at 1 and read last, at 8; records 1 and 2 are the module's, read at 6 and 7."""
    trace = trace_of((100, 1, 8, 9), (200, 2, 7, 8), (400, 3, 6, 8))
    trace.modules = [ModuleRecord(NAME, 4.0, 1, 4, [key(1), key(2)], [key(0)], 10)]
    return trace


def recompute(trace: StepTrace, plan: Plan | None = None) -> Plan:
    plan = plan or plan_of(trace)
    again = tuple(Recompute(m.record.key, m.freed_bytes, m.record.forward_ms) for m in modules_of(trace))
    return Plan(plan.model, 0, plan.swaps, again)


def test_what_it_frees_is_gone_when_nobody_else_holds_it_until_its_first_read_and_it_runs_again() -> None:
    trace = toy()
    outcome = simulate(trace, recompute(trace))
    # Its input that nobody saves is there until it has run again, while it runs too.
    assert [v - BASE for v in outcome.curve] == [0, 0, 100, 300, 500, 110, 110, 710, 100, 0]
    assert outcome.recompute_ms == 4.0 and outcome.stall_ms == 0.0 and outcome.step_ms == trace.step_ms + 4.0


def test_its_input_is_needed_when_it_runs_and_copies_go_on_meanwhile() -> None:
    trace = toy()
    outcome = simulate(trace, recompute(trace, plan_of(trace, (0, 3, 5))))
    assert outcome.h2d == [Copy(key(0), 50.0, 60.0)] and outcome.stall_ms == 0.0
    late = simulate(trace, recompute(trace, plan_of(trace, (0, 3, 7))))  # planned for its own read: too late now
    assert late.h2d == [Copy(key(0), 60.0, 70.0)] and late.late_loads == [key(0)] and late.step_ms == 90.0 + 10.0 + 4.0


def test_it_takes_the_host_some_time_too_as_far_as_the_device_waits_for_the_host() -> None:
    trace = toy()
    trace.backward_waits = 1.0
    assert simulate(trace, recompute(trace)).recompute_ms == 4.0
    trace.forward_waits = 0.5
    outcome = simulate(trace, recompute(trace))
    assert outcome.recompute_ms == pytest.approx(4.0 + (CALL_HOST_MS + 2 * DROP_HOST_MS) / 2)
    assert outcome.step_ms == trace.step_ms + outcome.recompute_ms


def test_what_another_one_is_run_from_is_made_first() -> None:
    """A norm gives record 1 to a product, which saves record 2. That is read at 5 and record 1 not before 7; but the
    product is run again from record 1, so the norm runs at 5 too."""
    trace = trace_of((100, 1, 8, 9), (200, 2, 7, 9), (400, 3, 5, 6))
    norm = ModuleRecord(ModuleKey(0, 0, 1, "norm"), 1.0, 1, 2, [key(1)], [key(0)])
    product = ModuleRecord(ModuleKey(0, 0, 1, "product"), 4.0, 2, 4, [key(2)], [key(1)])
    trace.modules = [norm]
    alone = simulate(trace, recompute(trace))
    assert [v - BASE for v in alone.curve] == [0, 0, 100, 300, 500, 500, 100, 100, 300, 0]
    trace.modules = [norm, product]
    both = simulate(trace, recompute(trace))
    # Record 2 is made at 5 and dies before 6.
    assert [v - BASE for v in both.curve] == [0, 0, 100, 300, 500, 100, 700, 300, 300, 0]
    assert both.recompute_ms == 5.0
    # What the norm is run from is needed at 5, too.
    swapped = simulate(trace, recompute(trace, plan_of(trace, (0, 3, 4))))
    assert swapped.h2d == [Copy(key(0), 40.0, 50.0)] and swapped.stall_ms == 0.0
    late = simulate(trace, recompute(trace, plan_of(trace, (0, 3, 7))))
    assert late.h2d == [Copy(key(0), 50.0, 60.0)] and late.late_loads == [key(0)]


def test_of_modules_inside_one_another_none_is_run_from_what_the_outer_one_frees() -> None:
    """It would be kept for the inner one."""
    trace = trace_of((100, 1, 8, 9), (200, 2, 7, 9), (400, 3, 5, 6))
    trace.modules = [
        ModuleRecord(ModuleKey(0, 0, 1, "mlp.act"), 1.0, 2, 4, [key(2)], [key(1)]),
        ModuleRecord(ModuleKey(0, 0, 1, "mlp"), 2.0, 1, 4, [key(1)], [key(0)]),
    ]
    with pytest.raises(ValueError, match="overlaps"):
        simulate(trace, recompute(trace))
    assert len(full_recompute(modules_of(trace))) == 1


def test_everything_recomputed_is_tried_with_chains_and_without() -> None:
    """What others are run from comes back early, and the peak may be there."""
    trace = trace_of((100, 1, 8, 9), (200, 2, 7, 9), (400, 3, 5, 6))
    trace.points[6].peak_bytes += 500
    trace.modules = [
        ModuleRecord(ModuleKey(0, 0, 1, "norm"), 1.0, 1, 2, [key(1)], [key(0)]),
        ModuleRecord(ModuleKey(0, 0, 1, "product"), 4.0, 2, 4, [key(2)], [key(1)]),
    ]
    peaks = [max(memory_curve(trace, (), as_they_run(trace, full_recompute(modules_of(trace), chains=chains))))
             for chains in (True, False)]  # fmt: skip
    found = {sum(corner.flags): corner.peak for corner in _Solver(trace, ALL_VERBS).corners if not corner.placed}
    assert peaks == [found[2], found[1]]
    assert _full_recompute(trace)[1] == min(peaks)


def test_a_plan_that_recomputes_what_is_not_there_is_refused() -> None:
    trace = toy()
    good = recompute(trace).recomputes[0]
    for bad, message in [
        ((good, good), "twice"),
        ((Recompute(good.key, 1, 4.0),), "frees 1 bytes"),
        ((Recompute(ModuleKey(0, 0, 7, "mlp"), 600, 4.0),), "never saw"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(trace, Plan("toy", 0, (), bad))
    with pytest.raises(ValueError, match="swaps and recomputes"):
        simulate(trace, Plan("toy", 0, plan_of(trace, (1, 4, 5)).swaps, (good,)))


def test_without_records_of_modules_whole_layers_are_offered() -> None:
    trace = megatron_trace(Shape(layers=3, microbatches=2))
    modules = modules_of(trace)
    assert [m.record.key[:3] for m in modules] == [(m, 0, layer) for m in (0, 1) for layer in (1, 2, 3)]
    assert {m.record.key.name for m in modules} == {WHOLE_LAYER}
    assert all(m.freed_bytes == (sum(Shape().sites_mib[1:]) + 8) * MIB for m in modules)
    assert modules[0].record.forward_ms == pytest.approx(Shape().layer_forward_ms * 11 / 10)  # 11 intervals


def test_identical_layers_are_solved_alike_and_the_cheapest_second_comes_first() -> None:
    trace = megatron_trace(Shape(layers=16, modules=LLAMA_MODULES, optimizer_mib=0))
    low, high = floor(trace, ALL_VERBS).reachable_bytes, max(point.peak_bytes for point in trace.points)
    names = []
    for share in (0.5, 0.3, 0.15):
        plan = solve(trace, low + int((high - low) * share), ALL_VERBS)
        layers = sorted(r.key.layer for r in plan.recomputes if r.key.name == "act")
        assert layers == list(range(layers[0], layers[-1] + 1)) if layers else True
        names.append({r.key.name for r in plan.recomputes})
    assert names[0] <= {"act", "input_norm", "mlp_norm"}, names
    assert plan.recomputes and plan.swaps, "both verbs together"


def test_both_directions_at_once_are_slower() -> None:
    trace = trace_of((100, 1, 6, 9), (100, 4, 8, 9))
    plan = plan_of(trace, (0, 3, 4), (1, 6, 7))
    trace.d2h_both_bytes_per_ms = trace.h2d_both_bytes_per_ms = 5.0
    outcome = simulate(trace, plan)
    assert outcome.d2h == [Copy(key(0), 10.0, 20.0), Copy(key(1), 40.0, 60.0)]
    assert outcome.h2d == [Copy(key(0), 40.0, 60.0), Copy(key(1), 70.0, 80.0)]
    trace.copy_overhead_ms = 1.0
    assert simulate(trace, plan).d2h[0] == Copy(key(0), 10.0, 21.0)


def test_a_host_budget_trims_the_plan_or_says_that_it_cannot() -> None:
    trace = megatron_trace(Shape(layers=4, microbatches=6, stages=2, optimizer_mib=0))
    budget = floor(trace).reachable_bytes + 2000 * MIB
    free = solve(trace, budget)
    assert free.prediction is not None and free.prediction.host_bytes == simulate(trace, free).host_bytes
    assert free.prediction.host_bytes < free.swap_bytes, "copies of microbatches follow one another"
    with pytest.raises(Infeasible, match="host budget of .* limits"):
        solve(trace, budget, host_budget_bytes=free.prediction.host_bytes // 4)
    roomy = floor(trace, host_budget_bytes=free.prediction.host_bytes // 4).reachable_bytes
    trimmed = simulate(trace, solve(trace, roomy + MIB, host_budget_bytes=free.prediction.host_bytes // 4))
    assert trimmed.host_bytes <= free.prediction.host_bytes // 4 and trimmed.peak <= roomy + MIB
    both = solve(trace, budget, ALL_VERBS, host_budget_bytes=free.prediction.host_bytes // 4)
    assert both.recomputes, "recompute takes what the host has no room for"
