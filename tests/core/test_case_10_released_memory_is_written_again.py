"""Memory is given up, taken by the next tensor and overwritten at once: the copy out must have read it before."""
import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager, recorded_plan, run_step

from mindspeed_swap.sim import device

NUMBERS = 256 << 10  # 1 MiB: what the simulated link moves at a time


@pytest.mark.parametrize("release", [0, 2])
def test_case_10_overwritten_right_after_release(sim, release):
    leaf = torch.linspace(0.1, 0.9, NUMBERS).requires_grad_()

    def body(layer):
        hidden = leaf
        for number in range(1, 6):
            with layer(number):
                hidden = (hidden * 1.25).sin()
            spoil = [torch.full((NUMBERS,), -7.0) for _ in range(3)]  # as large, so that it gets what was given up
            del spoil
        return hidden.mean()

    plain = run_step(body, [leaf])
    manager = new_manager(sim)
    plan = recorded_plan(body, [leaf], manager, release=release)
    assert plan.swaps
    before = device.stats()
    device.set_link(0.05, 16.0)  # 20 ms per tensor on its way out
    for _ in range(2):
        outcome = run_step(body, [leaf], manager, plan)
        assert_same(outcome, plain)
        assert outcome.stats.offloaded_bytes == plan.swap_bytes
    after = device.stats()
    assert all(after[name] == before[name] for name in ("freed_under_copy", "late_writes"))
    assert_nothing_left(manager)
