"""Forward alone, evaluation, then a training step: nothing is left dirty, nothing is kept."""
import gc

import pytest
import torch
from swapping import assert_nothing_left, assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.sim import device


@pytest.mark.parametrize("planned", [False, True])
def test_case_13_forward_only_then_evaluation_then_training(sim, planned):
    body, leaves = blocks(4, width=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=2) if planned else None
    assert_nothing_left(manager)
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    base = device.memory_allocated()

    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    del loss
    assert_nothing_left(manager)
    assert device.memory_allocated() == base

    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), manager.forward(0):
            body(manager.layer)
        assert_nothing_left(manager)

    assert_same(run_step(body, leaves, manager, plan), plain)
    assert_nothing_left(manager)


def test_case_13_evaluation_between_forward_and_backward(sim):
    """The evaluation needs memory: what training saved is pushed out from inside inference mode, and comes back."""
    body, leaves = blocks(4, width=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    manager.begin_step()
    with manager.forward(0):
        loss = body(manager.layer)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert (manager.evict(1 << 40) > 0) == (mode is torch.inference_mode)  # all of it the first time
            body(lambda number: manager.layer(number))
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    for leaf, grad in zip(leaves, plain.grads, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_case_13_the_prefetch_falls_into_an_evaluation(sim):
    """Positions of an evaluation can be those of the plan: what it fetches early is right all the same."""
    body, leaves = blocks(4, width=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=1)
    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    with torch.inference_mode(), manager.forward(0):
        for key in list(manager.live.by_key):
            manager._prefetch(manager.live.by_key[key])
    for leaf in leaves:
        leaf.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    for leaf, grad in zip(leaves, plain.grads, strict=True):
        assert torch.equal(leaf.grad, grad + grad)
