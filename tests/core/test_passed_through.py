"""Tensors that are not ours to move are passed through, with the right gradients."""

import numpy
import pytest
import torch
from swapping import (
    assert_equal_bits,
    assert_nothing_left,
    assert_same,
    check_swapped,
    new_manager,
    run_step,
)

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
