"""A backward hands out a view of a saved tensor: its memory must not be given up while the view lives."""
import pytest
import torch
from swapping import assert_equal_bits, assert_nothing_left, new_manager, recorded_plan, run_step

from mindspeed_swap.sim import device


class ReturnsAView(torch.autograd.Function):
    """Its gradient is a part of what it saved, as it is."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return saved[8:40].view_as(grad), None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_case_07_a_view_of_a_saved_tensor_is_returned(sim, prefetch):
    leaves = [torch.randn(32, 64, requires_grad=True) for _ in range(4)]

    def body(layer):
        total = torch.zeros(())
        for number, leaf in enumerate(leaves, 1):
            with layer(number):
                total = total + ReturnsAView.apply(leaf, leaf.new_full((48, 64), float(number)).cumsum(0)).sum()
        return total

    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=prefetch)
    assert len(plan.swaps) == 4
    device.set_link(0.02, 0.02)  # 10^9 bytes per second: copies are late, and memory is wanted again meanwhile
    for _ in range(3):
        outcome = run_step(body, leaves, manager, plan)
        spoil = [torch.full((48, 64), -1.0) for _ in range(16)]  # takes whatever was given up
        for found, expected in zip(outcome.grads, plain.grads, strict=True):
            assert_equal_bits(found, expected)
        for leaf, expected in zip(leaves, plain.grads, strict=True):
            assert_equal_bits(leaf.grad, expected)
        del spoil
    for leaf in leaves:
        leaf.grad = None
    assert_nothing_left(manager)
