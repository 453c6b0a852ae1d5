"""Tensors that are not ours to move are passed through, with the right gradients."""
import gc

import numpy
import pytest
import torch
from swapping import (
    assert_equal_bits,
    assert_nothing_left,
    assert_same,
    blocks,
    capacity,
    check_swapped,
    new_manager,
    new_trace,
    recorded_plan,
    run_step,
)

from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Agenda, Plan
from mindspeed_swap.core.saved_tensor import Passed
from mindspeed_swap.sim import device

SIZE = 32


class Sub(torch.Tensor):
    pass


def host_tensor():
    with device.host_memory():
        return torch.randn(SIZE, SIZE)


def named():
    return torch.randn(SIZE, SIZE).refine_names("a", "b")


ODD = {
    "sparse coo": lambda: torch.randn(SIZE, SIZE).relu().to_sparse(),
    "sparse csr": lambda: torch.randn(SIZE, SIZE).relu().to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(SIZE, 3), torch.randn(SIZE, 5)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(9, 64), torch.randn(7, 64)], layout=torch.jagged),
    "conj": lambda: torch.randn(SIZE, SIZE, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(SIZE, SIZE, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(SIZE, SIZE), 0.1, 0, torch.qint32),
    "named": named,
    "zero bytes": lambda: torch.empty(0, SIZE),
    "meta": lambda: torch.empty(SIZE, SIZE, device="meta"),
    "host": host_tensor,
    "numpy": lambda: torch.from_numpy(numpy.random.default_rng(0).random((SIZE, SIZE))),
    "parameter": lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE)),
    "view of a parameter": lambda: torch.nn.Parameter(torch.randn(SIZE, SIZE)).t(),
    "leaf": lambda: torch.randn(SIZE, SIZE, requires_grad=True),
    "subclass": lambda: torch.randn(SIZE, SIZE).as_subclass(Sub),
    "small": lambda: torch.randn(3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_refused_and_handed_back(sim, name):
    manager = new_manager(sim, min_bytes=0 if name == "zero bytes" else 1024)
    tensor = ODD[name]()
    with manager.forward(0):
        packed = manager._pack(tensor)
    assert isinstance(packed, Passed)
    assert set(manager.bytes_in.values()) == {0}
    assert manager.evict(1 << 40) == 0
    found = manager.unpack(packed)
    assert (found is tensor) == (name == "parameter")  # whose attributes some backward functions need
    assert type(found) is type(tensor)
    assert (found.layout, found.dtype, found.device) == (tensor.layout, tensor.dtype, tensor.device)
    assert found._version == tensor._version
    if name in ("conj", "neg"):
        assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert_equal_bits(found, tensor)
    if name == "named":
        assert found.names == tensor.names


def test_a_parameter_keeps_its_attributes_where_autograd_lets_it(sim):
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    weight.main_grad = torch.zeros(SIZE, SIZE)
    manager = new_manager(sim)
    with manager.forward(0):
        packed = manager._pack(weight)
    assert manager.unpack(packed).main_grad is weight.main_grad


@pytest.mark.filterwarnings("ignore")
def test_gradients_through_what_is_passed(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    adjacency = torch.randn(SIZE, SIZE).relu().to_sparse()
    foreign = torch.from_numpy(numpy.random.default_rng(0).random((SIZE, SIZE)).astype("float32"))
    host = host_tensor()

    def body(layer):
        with layer(1):
            hidden = torch.sparse.mm(adjacency, leaf * 2.0) * foreign * host
            complex_ = torch.complex(hidden, hidden.sin())
            product = (complex_.conj() @ complex_.t()).imag * complex_.conj().imag
        with layer(2):
            tail = (product.as_subclass(Sub) * weight.t()).as_subclass(torch.Tensor)
            return tail.sum() + (product[:0] * 2.0).sum() + product[0, 0].exp()

    plain = run_step(body, [leaf, weight])
    manager = new_manager(sim)
    manager.on_interval = lambda interval: manager.evict(1 << 40)
    outcome = run_step(body, [leaf, weight], manager)
    assert outcome.stats.evictions > 0
    assert_same(outcome, plain)
    assert_nothing_left(manager)


def light_step(body, leaves, manager, plan=None, read_order=None):
    for leaf in leaves:
        leaf.grad = None
    manager.begin_step(plan, light=True, read_order=read_order)
    with manager.forward(0):
        loss = body(manager.layer)
    loss.backward()
    return manager.end_step()[0]


def test_what_no_plan_wants_is_loose(sim):
    """It passes, and comes back; the next step finds what it saves under the same names."""
    body, leaves = blocks(3, width=32)
    plain, manager = run_step(body, leaves), new_manager(sim)
    names = [record.key for record in run_step(body, leaves, manager, record=True).trace.saved]
    for leaf in leaves:
        leaf.grad = None
    manager.begin_step(light=True)
    with manager.forward(0):
        loss = body(manager.layer)
        assert set(manager.bytes_in.values()) == {0}
    loss.backward()
    stats, _ = manager.end_step()
    assert stats.saved == 0 and stats.saves >= len(names)
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, plain.grads, strict=True))
    assert [record.key for record in run_step(body, leaves, manager, record=True).trace.saved] == names
    assert_nothing_left(manager)


def test_a_recorded_step_and_one_that_is_watched_is_never_light(sim):
    body, leaves = blocks(3, width=32)
    manager = new_manager(sim)
    manager.begin_step(trace=new_trace(), light=True)
    with manager.forward(0):
        loss = body(manager.layer)
        assert sum(manager.bytes_in.values()) > 0
    del loss
    manager.end_step()
    manager.on_interval = lambda interval: None
    manager.begin_step(light=True)
    with manager.forward(0):
        loss = body(manager.layer)
        assert sum(manager.bytes_in.values()) > 0
    del loss
    manager.end_step()


def test_a_plan_moves_the_same_in_a_light_step(sim):
    body, leaves = blocks(6, width=32)
    plain, manager = run_step(body, leaves), new_manager(sim)
    everything = recorded_plan(body, leaves, manager)
    plan = Plan(everything.model, 0, everything.swaps[::3])  # their points are where others are saved and read
    for _ in range(3):
        stats = light_step(body, leaves, manager, plan)
        assert stats.offloaded_bytes == stats.loaded_bytes == plan.swap_bytes > 0
        assert stats.ineffective_bytes == stats.on_demand_loads == stats.skipped_prefetches == 0
        assert len(plan.swaps) <= stats.saved <= len(Agenda(plan.swaps).saves) < stats.saves
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, plain.grads, strict=True))
    assert_nothing_left(manager)


@pytest.mark.parametrize("planned", [False, True])
def test_loose_ones_are_pushed_out_when_memory_is_short(sim, planned):
    body, leaves = blocks(8, width=64)
    manager = new_manager(sim)
    recorded = recorded_plan(body, leaves, manager)
    plan = Plan(recorded.model, 0, recorded.swaps[:2]) if planned else None
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    gc.collect()

    def step(plan=None):
        for leaf in leaves:
            leaf.grad.zero_()
        device.reset_peak()
        before = device.memory_allocated()
        manager.begin_step(plan, light=True)
        with manager.forward(0):
            loss = body(manager.layer)
        loss.backward()
        return manager.end_step()[0], device.max_memory_allocated() - before

    peak_bytes = step()[1]
    grads = [leaf.grad.clone() for leaf in leaves]
    with capacity(device.memory_allocated() + int(0.8 * peak_bytes)):
        guard = OomGuard(manager)
        stats, _ = step(plan)
        guard.close()
    assert stats.evictions > 0 and stats.on_demand_loads > 0
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, grads, strict=True))
    assert_nothing_left(manager)


def test_several_loose_views_of_one_storage_are_taken_up_together(sim):
    """Else one of them would hold what the others give up."""
    manager = new_manager(sim)
    leaf = torch.randn(64, 64, requires_grad=True)

    def step(light):
        leaf.grad = None
        manager.begin_step(light=light)
        with manager.forward(0):
            hidden = leaf * 2
            found = (hidden.exp() @ hidden.t().sigmoid() + hidden[:, :64].sin() * hidden.t()).sum()
            del hidden
            freed = manager.evict(1 << 40) if light else 0
        found.backward()
        return freed, manager.end_step()[0], leaf.grad.clone()

    freed, stats, grad = step(True)
    assert freed == stats.evicted_bytes > 0
    assert_equal_bits(grad, step(False)[2])
    assert_nothing_left(manager)


def test_a_loose_one_that_was_changed_in_place_is_an_error_as_ever(sim):
    manager = new_manager(sim)
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    for evicted in (False, True):
        manager.begin_step(light=True)
        with manager.forward(0):
            middle = leaf.exp()
            result = middle.sin().sum()
            if evicted:
                manager.evict(1 << 40)
            middle.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
        del middle, result
        manager.end_step()
    assert_nothing_left(manager)


def test_a_loose_one_is_read_twice_and_from_a_retained_graph(sim):
    manager = new_manager(sim)
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager.begin_step(light=True)
    with manager.forward(0):
        result = leaf.exp().sin().sum()
    first, = torch.autograd.grad(result, leaf, retain_graph=True)
    second, = torch.autograd.grad(result, leaf, retain_graph=True, create_graph=True)
    third, = torch.autograd.grad(result, leaf)
    assert torch.equal(first, second) and torch.equal(first, third)
    del result, second
    manager.end_step()
    assert_nothing_left(manager)


class Views(torch.autograd.Function):
    """Saves a view of its input that it has made itself, as Transformer Engine's layers do."""

    @staticmethod
    def forward(ctx, hidden, weight):
        rows = hidden.view(-1, hidden.shape[-1])
        assert rows.is_leaf and rows.requires_grad and not hidden.is_leaf
        ctx.save_for_backward(rows, weight)
        return (rows @ weight).view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        flat = grad.reshape(rows.shape)
        return (flat @ weight.t()).view_as(grad), rows.t() @ flat


def test_a_view_that_a_function_makes_of_its_input_moves(sim):
    weights = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4)]
    inputs = torch.randn(8, 16, 64)

    def body(layer):
        hidden = inputs
        for number, weight in enumerate(weights, 1):
            with layer(number):
                hidden = Views.apply(hidden + weights[0].mean(), weight)
        return hidden.square().mean()

    manager, plan, _ = check_swapped(body, weights, sim)
    rows = [swap for swap in plan.swaps if swap.nbytes == inputs.nbytes and 1 <= swap.key.layer < len(weights)]
    assert len(rows) == len(weights) - 1  # of the last one the release would come too late


def test_a_view_of_a_leaf_does_not(sim):
    """What its gradient accumulator holds stays, whoever calls it a view."""
    manager, leaf = new_manager(sim), torch.randn(SIZE, SIZE, requires_grad=True)
    with torch.no_grad():
        views = [leaf.view(-1), torch.randn(SIZE, SIZE).view(-1).requires_grad_()]
    with manager.forward(0):
        assert all(isinstance(manager._pack(view), Passed) for view in (*views, leaf.t()))
