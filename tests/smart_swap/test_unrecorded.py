"""Recorded steps, told as they are without recording and without their plan."""
from __future__ import annotations

from dataclasses import replace

import pytest
from traces import Shape, megatron_trace

from mindspeed_swap.core.lanes import MOVE_HOST_MS
from mindspeed_swap.core.simulate import plain_step_ms, simulate
from mindspeed_swap.core.solve import floor, solve
from mindspeed_swap.core.trace import ModuleKey, ModuleRecord
from mindspeed_swap.smart_swap.unrecorded import Unrecorded

SHAPE = Shape(layers=4, sites_mib=(16, 32, 64), transient_mib=32, static_mib=256, optimizer_mib=32, logits_mib=16)
FASTER = 4  # device and link than those of the trace: what moves take the host is much of such a step
TRACE = replace(megatron_trace(SHAPE), forward_waits=1.0, backward_waits=1.0)
for _name in ("d2h_bytes_per_ms", "h2d_bytes_per_ms", "d2h_both_bytes_per_ms", "h2d_both_bytes_per_ms"):
    setattr(TRACE, _name, FASTER * getattr(TRACE, _name))
TRACE.step_ms /= FASTER
TRACE.points[:] = [
    replace(point, waits_for_host=True, time_ms=point.time_ms / FASTER) for point in TRACE.points
]
PLAIN_MS = TRACE.step_ms
PLAN = solve(TRACE, (floor(TRACE).reachable_bytes + max(point.peak_bytes for point in TRACE.points)) // 2)
PROMISED = PLAN.prediction


def test_the_plan_is_one_whose_moves_take_the_host():
    assert 2 * len(PLAN.swaps) * MOVE_HOST_MS == pytest.approx(PROMISED.host_ms) and PROMISED.host_ms > 0.04 * PLAIN_MS


def test_without_a_plan_it_takes_as_long_as_it_did():
    assert plain_step_ms(Unrecorded().told(TRACE, 0.9 * PLAIN_MS, None)) == pytest.approx(0.9 * PLAIN_MS)
    assert Unrecorded().told(TRACE, 1.1 * PLAIN_MS, None) is TRACE


@pytest.mark.parametrize("pace", [0.9, 1.0])
def test_the_same_plan_is_told_to_take_as_long_as_it_did(pace):
    took_ms = pace * PLAIN_MS + PROMISED.host_ms
    recorded = replace(TRACE, step_ms=PLAIN_MS + PROMISED.host_ms)
    told = Unrecorded().told(recorded, took_ms, PLAN)
    assert plain_step_ms(told) == pytest.approx(pace * PLAIN_MS)
    assert simulate(told, PLAN).prediction.host_ms == pytest.approx(PROMISED.host_ms)


def test_what_ran_again_in_one_try_is_known_in_the_next():
    key = ModuleKey(0, 0, 1, "mlp")
    it, module = Unrecorded(), ModuleRecord(key, 5.0, 0, 1, [], [])

    def told(**measured: float) -> float | None:
        trace = replace(TRACE, modules=[replace(module, **measured)])
        return it.told(trace, PLAIN_MS, PLAN).modules[0].again_ms

    assert told() is None
    assert told(again_ms=2.0) == told() == 2.0
    assert told(again_ms=3.0) == told() == 2.0  # the host was slow
    assert told(again_ms=1.5) == told() == 1.5
