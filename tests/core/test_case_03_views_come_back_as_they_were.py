"""Offsets, strides and types of views survive the way through host memory."""
import pytest
import torch
from swapping import assert_equal_bits, bits, check_swapped, new_manager

from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.trace import FORWARD, Key, Position

VIEWS = {
    "steps": lambda x: x[:, 1:, ::2],
    "expanded": lambda x: x[:1].expand(6, -1, -1),
    "transposed slice": lambda x: x[1:3].transpose(0, 2),
    "overlapping": lambda x: x.flatten().as_strided((9, 5), (2, 3), 7),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "scalar": lambda x: x[2, 3, 4],
    "empty": lambda x: x[:, :0],
    "channels last": lambda x: x[None].to(memory_format=torch.channels_last),
    "complex": lambda x: torch.view_as_complex(x.unflatten(2, (5, 2))),
    "other type": lambda x: x.view(torch.int16),
    "longer type": lambda x: x.view(torch.float64),
    "bytes": lambda x: x.view(torch.uint8)[..., 3:9],
}


@pytest.mark.parametrize("name", VIEWS)
def test_case_03_a_view_returns_with_its_geometry(sim, name):
    """Straight through the hooks: saved, released, read."""
    manager = new_manager(sim, min_bytes=1)
    base = torch.randn(4, 6, 10)
    view = VIEWS[name](base)
    expected, geometry = view.clone(), (view.shape, view.stride(), view.storage_offset(), view.dtype)
    key = Key(0, 0, 0, 0)
    end = Position(FORWARD, 0, 0, 0, -2)
    manager.begin_step(Plan("", 0, (Swap(key, view.untyped_storage().nbytes(), end, end._replace(phase="O")),)))
    with manager.forward(0):
        handle = manager._pack(view)
        del base, view
    assert handle.saved.state is State.HOST and not handle.saved.held_elsewhere()
    found = manager.unpack(handle)
    assert (found.shape, found.stride(), found.storage_offset(), found.dtype) == geometry
    assert_equal_bits(found, expected)
    assert found.untyped_storage().nbytes() == handle.saved.nbytes


def test_case_03_gradients_through_offset_and_strided_views(sim):
    leaf = torch.randn(6, 8, 10, requires_grad=True)

    def body(layer):
        with layer(1):
            x = leaf * 2.0
            parts = [x[:, 1:, ::2].exp(), x[:1].expand(6, -1, -1).sin(), x[1:3].transpose(0, 2).square()]
            del x
        with layer(2):
            return sum(part.cos().sum() for part in parts)

    check_swapped(body, [leaf], sim)


class SavesBits(torch.autograd.Function):
    """Saves the bit pattern of an activation, and its top half."""

    @staticmethod
    def forward(ctx, x):
        halves = x.detach().view(torch.int16)
        ctx.save_for_backward(halves, halves.view(torch.uint8)[..., ::4])
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        halves, quarter = ctx.saved_tensors
        assert halves.dtype is torch.int16 and quarter.dtype is torch.uint8
        return grad * halves.view(torch.float32) + quarter.sum()


def test_case_03_bit_patterns_saved_by_a_function(sim):
    leaf = torch.randn(32, 32, requires_grad=True)

    def body(layer):
        with layer(1):
            out = SavesBits.apply(leaf * 2.0)
        with layer(2):
            return out.sin().sum()

    check_swapped(body, [leaf], sim)


def test_case_03_a_small_view_of_a_large_storage(sim):
    """What is freed is the storage, so it is the storage that travels."""
    leaf = torch.randn(8, requires_grad=True)

    def body(layer):
        with layer(1):
            large = torch.zeros(1 << 16) + leaf.repeat(1 << 13)
            out = large[100:108].exp() * large[5000:5008]
            del large
        with layer(2):
            return out.sin().sum()

    _, plan, _ = check_swapped(body, [leaf], sim)
    assert [swap.nbytes for swap in plan.swaps] == [4 << 16]
    assert bits(leaf).numel() == 32
