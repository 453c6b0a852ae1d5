"""What a plan leaves to chance: copies have time to spare where that costs neither time nor memory."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from test_solve import SHARES, TRACES, assert_legal, between
from traces import Shape, megatron_trace

from mindspeed_swap.core.lanes import NEGLIGIBLE_MS
from mindspeed_swap.core.simulate import memory_curve, simulate
from mindspeed_swap.core.solve import ALL_VERBS, _Solver, floor, solve
from mindspeed_swap.core.trace import StepTrace

FASTER = 0.75


def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Solver, "_relaxed", lambda self, found: found.placed)


def faster(trace: StepTrace, share: float) -> StepTrace:
    """All of its work takes that share of the time; the link is as it is."""
    points = [replace(point, time_ms=share * point.time_ms) for point in trace.points]
    return replace(trace, points=points, step_ms=share * trace.step_ms)


@settings(max_examples=40, deadline=None)
@given(TRACES, SHARES)
def test_it_costs_neither_time_nor_memory(trace: StepTrace, share: float) -> None:
    budget = between(trace, share)
    relaxed = solve(trace, budget)
    with pytest.MonkeyPatch.context() as patch:
        tight(patch)
        before = solve(trace, budget)
    assert_legal(trace, relaxed)
    assert relaxed.prediction.step_ms <= before.prediction.step_ms + NEGLIGIBLE_MS
    assert relaxed.prediction.peak == before.prediction.peak
    assert {swap.key for swap in relaxed.swaps} == {swap.key for swap in before.swaps}
    for swap in relaxed.swaps:
        (was,) = (each for each in before.swaps if each.key == swap.key)
        points = {point.position: i for i, point in reversed(list(enumerate(trace.points)))}
        assert points[was.release] <= points[swap.release] < points[swap.prefetch] <= points[was.prefetch]


@pytest.mark.parametrize("microbatches, stages", [(1, 1), (4, 1), (8, 4)])
def test_a_faster_step_waits_less(monkeypatch, microbatches, stages):
    trace = megatron_trace(Shape(layers=8, microbatches=microbatches, stages=stages))
    low, high = floor(trace).reachable_bytes, max(memory_curve(trace, ()))
    quick = faster(trace, FASTER)
    waits = []
    for relax in (True, False):
        if not relax:
            tight(monkeypatch)
        plan = solve(trace, low + int(0.85 * (high - low)))
        assert plan.prediction.stall_ms <= NEGLIGIBLE_MS and plan.swaps
        waits.append(simulate(quick, plan).stall_ms)
    assert waits[0] < 0.6 * waits[1], waits


@pytest.mark.parametrize("layer_forward_ms", [3.0, 6.0])
@pytest.mark.parametrize("share", [0.6, 0.3, 0.2])
def test_what_moves_take_the_host_does_not_lead_the_search_astray(layer_forward_ms, share):
    """It is no wait, and there however much runs again: found is no less than when nobody reckons with it."""
    sites = (48.0, 48.0, 96.0, 96.0, *(4.0,) * 24)
    modules = (("mlp", tuple(range(2, len(sites))), (1,), 0.5), ("layer", tuple(range(1, len(sites))), (0,), 1.0))
    shape = Shape(layers=12, sites_mib=sites, modules=modules, layer_forward_ms=layer_forward_ms, d2h_gbps=15.0,
                  h2d_gbps=15.0)  # fmt: skip
    trace = replace(megatron_trace(shape), forward_waits=0.6, backward_waits=0.1)
    low, high = floor(trace, ALL_VERBS).reachable_bytes, max(memory_curve(trace, ()))
    budget = low + int(share * (high - low))
    unaware = solve(replace(trace, forward_waits=0.0, backward_waits=0.0), budget, ALL_VERBS)
    found = solve(trace, budget, ALL_VERBS).prediction
    assert found.host_ms > 0 and found.step_ms <= simulate(trace, unaware).step_ms + NEGLIGIBLE_MS
