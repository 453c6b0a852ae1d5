"""Backward a second time over a retained graph: equal gradients, and memory back to base afterwards."""
import gc

import pytest
import torch
from swapping import assert_nothing_left, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.sim import device


@pytest.mark.parametrize("pressure", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_case_14_three_times(sim, planned, pressure):
    body, leaves = blocks(4, width=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager) if planned else None
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    base = device.memory_allocated()

    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    for keep in (True, True, False):
        grads = torch.autograd.grad(loss, leaves, retain_graph=keep)
        for found, expected in zip(grads, plain.grads, strict=True):
            assert torch.equal(found, expected)
        if keep and pressure:
            assert manager.evict(1 << 40) > 0
    del loss, grads, found
    assert_nothing_left(manager)
    assert device.memory_allocated() == base


def test_case_14_freed_graph_says_what_pytorch_says(sim):
    body, leaves = blocks(2, width=32)
    manager = new_manager(sim)
    with manager.forward(0):
        loss = body(manager.layer)
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_case_14_create_graph(sim):
    """Gradients of gradients, from a first backward that was swapped."""
    leaf = torch.randn(24, 24, requires_grad=True)

    def body(layer):
        with layer(1):
            hidden = (leaf @ leaf).tanh()
        with layer(2):
            return (hidden.exp() * hidden).sum()

    def second(loss, pressure):
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        pressure()
        return torch.autograd.grad(grad.sin().sum(), leaf)[0]

    expected = second(body(lambda number: torch.enable_grad()), lambda: None)
    manager = new_manager(sim)
    for plan in (None, recorded_plan(body, [leaf], manager)):
        manager.begin_step(plan)
        with manager.forward(0):
            loss = body(manager.layer)
        assert torch.equal(second(loss, lambda: manager.evict(1 << 40)), expected)
        del loss
        assert_nothing_left(manager)


def test_case_14_backward_inside_the_region(sim):
    """A gradient penalty: the first backward runs, and saves, while the hooks are active."""
    leaf = torch.randn(24, 24, requires_grad=True)

    def body(layer):
        with layer(1):
            hidden = (leaf @ leaf).tanh()
            out = (hidden.exp() * hidden).sum()
            (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        with layer(2):
            return out + grad.square().mean()

    plain = run_step(body, [leaf])
    manager = new_manager(sim)
    plan = recorded_plan(body, [leaf], manager)
    for each in (None, plan):
        manager.on_interval = lambda interval: manager.evict(1 << 40)
        outcome = run_step(body, [leaf], manager, each)
        assert outcome.stats.evictions > 0
        assert torch.equal(outcome.grads[0], plain.grads[0])
        assert_nothing_left(manager)
