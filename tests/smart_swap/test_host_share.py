"""What moves take the host, by what steps of plans took."""
from __future__ import annotations

from dataclasses import replace

import pytest
from traces import Shape, megatron_trace

from mindspeed_swap.core.lanes import MOVE_HOST_MS
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.solve import floor, solve
from mindspeed_swap.smart_swap.host_share import LEAST_SHARE, HostShare

SHAPE = Shape(layers=4, sites_mib=(16, 32, 64), transient_mib=32, static_mib=256, optimizer_mib=32, logits_mib=16)
TRACE = replace(megatron_trace(SHAPE), forward_waits=1.0, backward_waits=1.0)
TRACE.points[:] = [replace(point, waits_for_host=True) for point in TRACE.points]
PLAIN_MS = TRACE.step_ms
PLAN = solve(TRACE, (floor(TRACE).reachable_bytes + max(point.peak_bytes for point in TRACE.points)) // 2)
PROMISED = PLAN.prediction
HOST_MS = PROMISED.host_ms


def tried(host: HostShare, host_ms: float, plan: Plan = PLAN):
    """A step of it in which moves took the host so long."""
    took_ms = PLAIN_MS + plan.prediction.stall_ms + plan.prediction.recompute_ms + host_ms
    return host.told(replace(TRACE, step_ms=took_ms), took_ms, plan)


def learned(*host_ms: float) -> HostShare:
    host = HostShare()
    host.told(TRACE, PLAIN_MS, None)
    for each in host_ms:
        tried(host, each)
    return host


def test_the_plan_is_one_whose_moves_take_the_host():
    assert 2 * len(PLAN.swaps) * MOVE_HOST_MS == pytest.approx(HOST_MS) and HOST_MS > 0.04 * PLAIN_MS


@pytest.mark.parametrize("shown, share", [(1.0, 1.0), (0.5, 0.5), (0.0, LEAST_SHARE), (-1.0, LEAST_SHARE), (3.0, 1.0)])
def test_a_try_tells_how_much_of_it_shows(shown, share):
    assert learned(shown * HOST_MS).share == pytest.approx(share)


def test_tries_are_averaged():
    host = learned(0.5 * HOST_MS)
    next_plan = replace(PLAN, prediction=replace(PROMISED, host_ms=0.5 * HOST_MS))  # made with that share
    tried(host, 0.5 * HOST_MS, next_plan)
    assert host.share == pytest.approx(0.5)
    tried(host, 0.8 * HOST_MS, next_plan)
    assert host.share == pytest.approx((0.5 + 0.5 + 0.8) / 3)


def test_what_is_planned_next_reckons_with_it():
    host = learned()
    trace = tried(host, 0.0)
    assert trace.forward_waits == pytest.approx(LEAST_SHARE) == trace.backward_waits
    # The step without a plan is not told to be shorter by what moves did not take.
    assert trace.step_ms == pytest.approx(PLAIN_MS + PROMISED.stall_ms + PROMISED.recompute_ms - LEAST_SHARE * HOST_MS)
    host = learned()
    assert tried(host, HOST_MS).step_ms == pytest.approx(PLAIN_MS + PROMISED.stall_ms + PROMISED.recompute_ms)


def test_without_a_plain_step_or_moves_that_count_nothing_is_learned():
    host = HostShare()
    tried(host, 0.0)
    assert host.share == 1.0
    host = learned()
    tried(host, 0.0, replace(PLAN, prediction=replace(PROMISED, host_ms=0.01 * PLAIN_MS)))
    tried(host, 0.0, replace(PLAN, prediction=replace(PROMISED, host_ms=0.0)))
    assert host.share == 1.0
