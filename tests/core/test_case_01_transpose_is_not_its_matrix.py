"""A square matrix and its transpose have the same pointer and type, and still are two tensors."""
import torch
from swapping import check_swapped

SIZE = 48


class Three(torch.autograd.Function):
    """Saves a matrix, its transpose and a slice of it in one node."""

    @staticmethod
    def forward(ctx, w, transposed, part):
        ctx.save_for_backward(w, transposed, part)
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        w, transposed, part = ctx.saved_tensors
        assert transposed.stride() == (1, SIZE) and part.stride() == (SIZE, 1) and part.shape == (SIZE, 5)
        grad_w = grad * w + 2 * grad * transposed + 3 * grad * (part @ part.t())
        return grad_w, grad.t() * w, grad[:, :5] * part


def one_node(leaf):
    def body(layer):
        with layer(1):
            w = leaf * 1.5  # an activation: not a leaf, not symmetric
            out = Three.apply(w, w.t(), w[:, :5])
            del w
        with layer(2):
            return out.sin().sum()

    return body


def test_case_01_matrix_transpose_and_slice_in_one_node(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    _, plan, _ = check_swapped(one_node(leaf), [leaf], sim)
    # w once, and the input of sin: the three views share one copy
    assert [swap.nbytes for swap in plan.swaps] == [SIZE * SIZE * 4] * 2


def test_case_01_a_node_per_view(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            w = leaf * 1.5
            a, b, c = w @ w.t(), w.t() @ w, w[:, :5] @ w[:5]
            del w
        with layer(2):
            return (a.sin() + b.cos() + c.exp()).sum()

    check_swapped(body, [leaf], sim)


class MadeInside(torch.autograd.Function):
    """Views made without grad mode say that they are leaves that require grad. Nobody else holds them."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w, w.t(), w[:, :5])
        return w.clone()

    backward = staticmethod(lambda ctx, grad: Three.backward(ctx, grad)[0])


def test_case_01_views_made_inside_the_function(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            out = MadeInside.apply(leaf * 1.5)
        with layer(2):
            return out.sin().sum()

    _, plan, _ = check_swapped(body, [leaf], sim)
    assert [swap.nbytes for swap in plan.swaps] == [SIZE * SIZE * 4] * 2
