"""One buffer, written and saved twice: two saves of two contents, although the memory is the same."""
import pytest
import torch
from swapping import assert_equal_bits, capture, new_manager

from mindspeed_swap.core.saved_tensor import State

SIZE = 32


class Scales(torch.autograd.Function):
    """Writes its second factor into a static buffer and saves that."""

    @staticmethod
    def forward(ctx, x, buffer, values):
        buffer.copy_(values)
        ctx.save_for_backward(buffer)
        return x * values

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("evicted", [False, True])
def test_case_41_two_saves_of_one_buffer(sim, evicted):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    buffer = torch.empty(SIZE, SIZE)
    one, two = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    manager = new_manager(sim)
    manager.begin_step()
    with manager.forward(0):
        first = Scales.apply(leaf, buffer, one).sum()
        (before,) = manager.live.by_serial.values()
        if evicted:  # the copy of the first content is taken while it is there
            manager._mover.offload(before)
            manager._mover.release(before, planned=False)
        second = Scales.apply(leaf, buffer, two).sum()
    saved = list(manager.live.by_serial.values())
    assert len(saved) == 2 and saved[0] is before
    if evicted:
        assert before.state is State.HOST
        manager._mover.offload(saved[1])
        manager._mover.release(saved[1], planned=False)
    (grad,) = torch.autograd.grad(second, leaf)
    assert_equal_bits(grad, two)
    # The first content is gone for plain PyTorch too, which says so.
    assert "modified by an inplace operation" in str(capture(lambda: torch.autograd.grad(first, leaf)))


def test_case_41_first_content_read_before_the_second_is_written(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    buffer = torch.empty(SIZE, SIZE)
    manager = new_manager(sim)
    for number in range(4):
        values = torch.randn(SIZE, SIZE)
        with manager.forward(number):
            loss = Scales.apply(leaf, buffer, values).sum()
        if number % 2:
            for saved in list(manager.live.by_serial.values()):
                manager._mover.offload(saved)
                manager._mover.release(saved, planned=False)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert_equal_bits(grad, values)
