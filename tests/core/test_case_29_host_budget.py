"""A plan that needs more host memory than there is: what fits is swapped, the rest stays, and nothing goes over."""
import pytest
from swapping import assert_nothing_left, assert_same, blocks, capacity, new_manager, recorded_plan, run_step

from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.sim import device

BUDGET = 256 << 10


def test_case_29_the_core_never_exceeds_its_budget(sim):
    body, leaves = blocks(8)
    plain = run_step(body, leaves)
    plan = recorded_plan(body, leaves, new_manager(sim), prefetch=2)
    assert plan.swap_bytes > 2 * BUDGET
    manager = new_manager(sim, host_bytes=BUDGET)
    for _ in range(2):
        outcome = run_step(body, leaves, manager, plan)
        assert_same(outcome, plain)
        assert outcome.stats.host_full > 0
        assert 0 < outcome.stats.offloaded_bytes < plan.swap_bytes
        assert manager.pool.pinned_bytes <= BUDGET
    assert_nothing_left(manager)


@pytest.mark.parametrize("hook", [True, False])
def test_case_29_eviction_stops_at_the_budget(sim, hook):
    """Room on neither side is an out of memory error that says so, and the next step runs."""
    import torch

    body, leaves = blocks(8)
    plain = run_step(body, leaves)
    manager = new_manager(sim, host_bytes=BUDGET)
    guard = OomGuard(manager, hook=hook)
    base = device.memory_allocated()
    with capacity(base + (plain.peak_bytes - base) // 3), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        run_step(body, leaves, manager)
    assert manager.pool.pinned_bytes <= BUDGET
    assert_same(run_step(body, leaves, manager), plain)
    guard.close()
    assert_nothing_left(manager)
