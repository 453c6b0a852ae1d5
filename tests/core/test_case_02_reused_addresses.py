"""The allocator reuses addresses: a new tensor is not the one that was copied from there before."""
import pytest
from swapping import assert_nothing_left, assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.sim import device

LAYERS = 20


@pytest.mark.parametrize("prefetch", [0, 3])
def test_case_02_twenty_equal_layers_copy_exactly_the_plan(sim, prefetch):
    body, leaves = blocks(LAYERS, width=16, tokens=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=prefetch)
    assert len(plan.swaps) >= 2 * LAYERS
    for _ in range(4):
        before = device.stats()
        outcome = run_step(body, leaves, manager, plan)
        device.synchronize()
        after = device.stats()
        assert_same(outcome, plain)
        assert after["d2h_bytes"] - before["d2h_bytes"] == plan.swap_bytes
        assert after["h2d_bytes"] - before["h2d_bytes"] == plan.swap_bytes
        assert outcome.stats.offloaded_bytes == outcome.stats.loaded_bytes == plan.swap_bytes
    assert_nothing_left(manager)
