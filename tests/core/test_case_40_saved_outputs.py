"""A saved output that is handed back as itself would be a cycle through C++ that pins the whole graph."""
import gc

import pytest
import torch
from swapping import assert_nothing_left, new_manager, recorded_plan

from mindspeed_swap.sim import device


@pytest.mark.parametrize("size", [2, 64], ids=["tiny", "large"])
@pytest.mark.parametrize("planned", [False, True])
def test_case_40_forward_without_backward_frees_everything(sim, size, planned):
    leaf = torch.randn(64, 64, requires_grad=True)

    def body(layer):
        with layer(1):
            large = (leaf @ leaf).tanh()  # saves its output; pinned by whatever pins the end of the graph
            small = large[:size, :size].exp().sigmoid().softmax(-1)
            del large
        with layer(2):
            return small.square().sum().sqrt()  # a saved output of four bytes

    manager = new_manager(sim)
    plan = recorded_plan(body, [leaf], manager) if planned else None
    leaf.grad = None
    assert_nothing_left(manager)
    base = device.memory_allocated()
    for _ in range(3):
        manager.begin_step(plan)
        with manager.forward(0):
            loss = body(manager.layer)
        del loss
        manager.end_step()
    gc.collect()
    manager.begin_step()
    assert device.memory_allocated() == base
    assert_nothing_left(manager)


def test_case_40_without_the_garbage_collector(sim):
    """No cycle at all: the reference counts suffice."""
    leaf = torch.randn(64, 64, requires_grad=True)
    manager = new_manager(sim)
    gc.collect()
    gc.disable()
    try:
        base = device.memory_allocated()
        manager.begin_step()
        with manager.forward(0):
            out = (leaf * 2.0).exp().sigmoid().sum().sqrt()
        del out
        manager.end_step()
        assert device.memory_allocated() == base
        assert set(manager.bytes_in.values()) == {0}
    finally:
        gc.enable()
