"""What moves take the host, by what steps of plans took."""
from __future__ import annotations

from dataclasses import replace

import pytest
from traces import Shape, megatron_trace

from mindspeed_swap.core.lanes import MOVE_HOST_MS
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import floor, solve
from mindspeed_swap.core.trace import ModuleKey, ModuleRecord
from mindspeed_swap.smart_swap.host_share import LEAST_SHARE, MOST_SHARE, HostShare

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
HOST_MS = PROMISED.host_ms


def tried(host: HostShare, host_ms: float, plan: Plan = PLAN, trouble: int = 0):
    """A step of it in which moves took the host so long."""
    took_ms = PLAIN_MS + plan.prediction.stall_ms + plan.prediction.recompute_ms + host_ms
    return host.told(replace(TRACE, step_ms=took_ms), took_ms, replace(plan), trouble)


def learned(*host_ms: float) -> HostShare:
    host = HostShare()
    host.told(TRACE, PLAIN_MS, None, 0)
    for each in host_ms:
        tried(host, each)
    return host


def test_the_plan_is_one_whose_moves_take_the_host():
    assert 2 * len(PLAN.swaps) * MOVE_HOST_MS == pytest.approx(HOST_MS) and HOST_MS > 0.04 * PLAIN_MS


@pytest.mark.parametrize("shown, share", [
    (1.0, 1.0), (0.5, 0.5), (3.0, 3.0), (0.0, LEAST_SHARE), (-1.0, LEAST_SHARE), (9.0, MOST_SHARE)
])  # fmt: skip
def test_a_try_tells_how_much_of_it_shows(shown, share):
    assert learned(shown * HOST_MS).share == pytest.approx(share)


def test_tries_are_averaged():
    host = learned(0.5 * HOST_MS)
    next_plan = replace(PLAN, prediction=replace(PROMISED, host_ms=0.5 * HOST_MS, host_share=0.5))
    tried(host, 0.5 * HOST_MS, next_plan)
    assert host.share == pytest.approx(0.5)
    tried(host, 0.8 * HOST_MS, next_plan)
    assert host.share == pytest.approx((0.5 + 0.5 + 0.8) / 3)


def test_what_is_planned_next_reckons_with_it():
    host = learned()
    trace = tried(host, 0.0)
    assert trace.host_share == pytest.approx(LEAST_SHARE)
    promised = simulate(trace, PLAN).prediction
    assert (promised.host_ms, promised.host_share) == pytest.approx((LEAST_SHARE * HOST_MS, LEAST_SHARE))
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


def test_few_moves_that_take_long_are_learned_from():
    host = learned()
    tried(host, 0.06 * PLAIN_MS, replace(PLAN, prediction=replace(PROMISED, host_ms=0.015 * PLAIN_MS)))
    assert host.share == pytest.approx(4.0)


def test_one_fast_try_is_not_the_last_word():
    host, expected = learned(), 0.07 * PLAIN_MS
    tried(host, 0.0, replace(PLAN, prediction=replace(PROMISED, host_ms=expected)))
    assert host.share == pytest.approx(LEAST_SHARE)
    promised = replace(PROMISED, host_ms=LEAST_SHARE * expected, host_share=LEAST_SHARE)
    tried(host, expected, replace(PLAN, prediction=promised))
    assert host.share == pytest.approx((LEAST_SHARE + 1.0) / 2)


def test_what_ran_again_in_one_try_is_known_in_the_next():
    key = ModuleKey(0, 0, 1, "mlp")
    host, module = learned(), ModuleRecord(key, 5.0, 0, 1, [], [])

    def told(**measured: float) -> ModuleRecord:
        trace = replace(TRACE, modules=[replace(module, **measured)])
        return host.told(trace, PLAIN_MS, PLAN, 0).modules[0]

    assert told().again_ms is None
    assert told(again_ms=2.0).again_ms == told().again_ms == 2.0
    assert told(again_ms=3.0).again_ms == told().again_ms == 3.0


def test_a_plan_is_told_by_the_share_that_it_was_made_with():
    """As one that is still there when the search begins again, or that another rank has made."""
    host = learned(0.2 * HOST_MS)
    took_ms = PLAIN_MS + PROMISED.stall_ms + PROMISED.recompute_ms + 0.2 * HOST_MS
    host.plain_ms = None
    told = host.told(replace(TRACE, step_ms=took_ms), took_ms, PLAN, 0)
    assert PROMISED.host_share == 1.0 and told.step_ms == pytest.approx(took_ms - 0.2 * HOST_MS)


def test_from_one_try_it_is_learned_once():
    """Ranks that wait for one another look at the same one again."""
    host = learned()
    took_ms = PLAIN_MS + PROMISED.stall_ms + PROMISED.recompute_ms + 0.5 * HOST_MS
    for _ in range(3):
        host.told(replace(TRACE, step_ms=took_ms), took_ms, PLAN, 0)
        assert host.share == pytest.approx(0.5)


def test_what_pressure_took_is_no_time_of_moves():
    host = HostShare()
    host.told(replace(TRACE, stall_ms=5.0), PLAIN_MS + 5.0, None, 0)
    assert host.plain_ms is None
    host.told(replace(TRACE, evicted_bytes=1), PLAIN_MS + 5.0, None, 0)
    assert host.plain_ms is None
    tried(host, 0.0)
    assert host.share == 1.0
    host = learned(0.2 * HOST_MS)
    tried(host, HOST_MS, trouble=3)
    assert host.share == pytest.approx(0.2)


def test_a_step_of_no_time_teaches_nothing():
    host = HostShare(plain_ms=0.0)
    host.told(TRACE, 0.0, replace(PLAN, prediction=replace(PROMISED, host_ms=0.0)), 0)
    assert host.share == 1.0
