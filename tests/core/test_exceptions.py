"""Whatever goes wrong in a step, the next one runs, and nothing is kept."""
import gc
import threading

import pytest
import torch
from swapping import assert_nothing_left, assert_same, blocks, capacity, new_manager, recorded_plan, run_step

from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.sim import device


class Stop(Exception):
    pass


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.save_for_backward(x)
        if where == "forward":
            raise Stop
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018
        raise Stop


def breaking(where):
    body, leaves = blocks(4, width=32)

    def broken(layer):
        with layer(7):
            hidden = Breaks.apply(leaves[0] * 2.0, where)
        return body(layer) + hidden.sum()

    def broken_late(layer):
        loss = body(layer)
        with layer(7):
            hidden = Breaks.apply((leaves[0] * 2.0).exp(), where)
        return loss + hidden.sum()

    return body, leaves, (broken, broken_late)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_the_next_step_runs_and_nothing_is_kept(sim, where, recorded, planned):
    body, leaves, broken = breaking(where)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=2) if planned else None
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    manager.begin_step()
    base = device.memory_allocated()
    for each in broken:
        with pytest.raises(Stop):
            run_step(each, leaves, manager, plan, record=recorded)
        for leaf in leaves:
            leaf.grad = None
        # PyTorch's engine keeps the nodes it did not get to until this thread's next backward.
        torch.ones(1, requires_grad=True).sum().backward()
        assert_nothing_left(manager)
        assert device.memory_allocated() == base
        assert manager.scope is None
        assert_same(run_step(body, leaves, manager, plan, record=recorded), plain)


def test_no_room_to_read_back(sim):
    """In an on-demand load: the error is the allocator's, and the tensor can be read once there is room."""
    manager = new_manager(sim)
    tensor = torch.randn(64, 64)
    expected = tensor.clone()
    with manager.forward(0):
        handle = manager._pack(tensor)
    del tensor
    assert manager.evict(1 << 40) > 0
    with capacity(device.memory_allocated() + 100), pytest.raises(torch.OutOfMemoryError):
        manager.unpack(handle)
    assert handle.saved.state is State.HOST
    assert torch.equal(manager.unpack(handle), expected)


def test_a_copy_that_cannot_be_queued(sim, monkeypatch):
    """While packing: the host block goes back, the tensor is not left behind."""
    body, leaves = blocks(2, width=32)
    manager = new_manager(sim)
    plain = run_step(body, leaves)
    plan = recorded_plan(body, leaves, manager)

    def fails(*arguments):
        raise RuntimeError("the link is down")

    monkeypatch.setattr(sim, "copy", fails)
    with pytest.raises(RuntimeError, match="the link is down"):
        run_step(body, leaves, manager, plan)
    monkeypatch.undo()
    assert_nothing_left(manager)
    assert_same(run_step(body, leaves, manager, plan), plain)


def test_a_plan_for_another_step(sim):
    """Keys that never come, sizes that differ, positions in the wrong order: slower, not wrong."""
    body, leaves = blocks(4, width=32)
    other, other_leaves = blocks(6, width=48)
    manager = new_manager(sim)
    plan = recorded_plan(other, other_leaves, manager, prefetch=3)
    assert_same(run_step(body, leaves, manager, plan), run_step(body, leaves))
    own = recorded_plan(body, leaves, manager)
    backwards = type(own)(own.model, 0, tuple(type(s)(s.key, s.nbytes, s.prefetch, s.release) for s in own.swaps))
    assert_same(run_step(body, leaves, manager, backwards), run_step(body, leaves))
    at_once = type(own)(own.model, 0, tuple(type(s)(s.key, s.nbytes, s.release, s.release) for s in own.swaps))
    assert_same(run_step(body, leaves, manager, at_once), run_step(body, leaves))
    assert_same(run_step(body, leaves, manager, own, microbatches=3), run_step(body, leaves, microbatches=3))
    assert_nothing_left(manager)


def test_garbage_storms(sim):
    """Handles die inside the manager's and the pool's locks, in any thread."""
    body, leaves = blocks(2, width=32)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=2)
    stop = threading.Event()

    def storm():
        while not stop.is_set():
            gc.collect(1)

    def abandoned():
        """A graph that only the garbage collector can free, with swapped tensors in it."""
        with manager.forward(9):
            loss = body(manager.layer)
        cycle = [loss]
        cycle.append(cycle)

    threads = [threading.Thread(target=storm)]
    before = gc.get_threshold()
    gc.set_threshold(1)
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            abandoned()
            manager.evict(1 << 18)
            assert_same(run_step(body, leaves, manager, plan), plain)
    finally:
        gc.set_threshold(*before)
        stop.set()
        for thread in threads:
            thread.join()
    assert_nothing_left(manager)


def test_a_finaliser_that_allocates_inside_a_move(sim):
    """Garbage collected while the lock is held may allocate, and so ask for room: that must not start another move."""
    manager = new_manager(sim)
    answers = []
    with manager.forward(0):
        handles = [manager._pack(torch.randn(64, 64)) for _ in range(3)]
    manager.observers.append(lambda saved, old: answers.append(manager.evict(1 << 40)))
    assert manager.evict(1 << 40) == 3 * 64 * 64 * 4
    assert set(answers) == {0}
    for handle in handles:
        assert manager.unpack(handle).shape == (64, 64)
