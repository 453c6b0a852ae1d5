"""A branch that backward never visits: its saved tensors end with the graph, whatever state they are in."""
import gc

import pytest
import torch
from swapping import assert_equal_bits, assert_nothing_left, new_manager, recorded_plan

from mindspeed_swap.sim import device


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_case_15_memory_is_back_after_the_region(sim, planned, evicted):
    leaf = torch.randn(64, 64, requires_grad=True)

    def body(layer):
        with layer(1):
            hidden = leaf * 2.0
            used, unused = hidden.exp(), (hidden.sin() @ hidden).exp()
            del hidden
        with layer(2):
            return used.cos().sum() + unused.cos().sum()

    def two_losses(layer):
        with layer(1):
            hidden = leaf * 2.0
            used, unused = hidden.exp(), (hidden.sin() @ hidden).exp()
            del hidden
        with layer(2):
            return used.cos().sum(), unused.cos().sum()

    manager = new_manager(sim)
    plan = recorded_plan(body, [leaf], manager) if planned else None
    leaf.grad = None
    assert_nothing_left(manager)
    base = device.memory_allocated()
    (expected,) = torch.autograd.grad(two_losses(lambda number: torch.enable_grad())[0], leaf)

    manager.begin_step(plan)
    with manager.forward(0):
        first, second = two_losses(manager.layer)
    if evicted:
        assert planned or manager.evict(1 << 40) > 0
    (found,) = torch.autograd.grad(first, leaf)
    assert_equal_bits(found, expected)
    del first, second, found, expected
    gc.collect()
    manager.end_step()
    assert_nothing_left(manager)
    assert device.memory_allocated() == base
