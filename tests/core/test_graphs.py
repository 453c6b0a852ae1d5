"""Graph shapes that hooks must survive: custom functions, checkpoints, hooks inside hooks, functional transforms."""
import pytest
import torch
from swapping import assert_nothing_left, assert_same, capture, check_swapped, new_manager, recorded_plan, run_step
from torch.utils.checkpoint import checkpoint

from mindspeed_swap.core.saved_tensor import State

SIZE = 32


class SavesEverything(torch.autograd.Function):
    """Its input, an intermediate and its output, read several times."""

    @staticmethod
    def forward(ctx, x, y):
        middle = x.exp()
        out = middle * y
        ctx.save_for_backward(x, middle, out, y)
        ctx.mark_non_differentiable(middle)
        return out, middle

    @staticmethod
    def backward(ctx, grad, _):
        for _ in range(3):
            x, middle, out, y = ctx.saved_tensors
        x2, _, out2, _ = ctx.saved_tensors
        assert torch.equal(x, x2) and torch.equal(out, out2)
        return grad * out * x.cos(), grad * middle + y


def test_inputs_intermediates_and_outputs(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            out, _ = SavesEverything.apply(leaf * 2.0, leaf * 3.0)
        with layer(2):
            return out.sin().sum()

    _, plan, _ = check_swapped(body, [leaf], sim)
    assert len(plan.swaps) == 4


class ReturnsWhatItSaved(torch.autograd.Function):
    """Backward returns a view of a saved tensor: it outlives the node and the save."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].t()


def test_a_view_of_a_saved_tensor_outlives_it(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            out = ReturnsWhatItSaved.apply(leaf * 2.0)
        with layer(2):
            return out * 1.0

    manager, plan, _ = check_swapped(body, [leaf], sim)
    run_step(body, [leaf], manager, plan)
    expected = leaf.grad.clone()
    [torch.full((SIZE, SIZE), -1.0) for _ in range(8)]  # takes whatever was given back
    assert torch.equal(leaf.grad, expected)


class WritesWithHistory(torch.autograd.Function):
    """Backward, itself recorded, changes what it was handed by something that requires grad."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach().clone())
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        saved.mul_(grad)
        return saved * grad


def test_history_of_a_change_in_backward_stays_out_of_the_alias(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def gradient(manager):
        x = leaf * 2.0
        with manager.forward(0) if manager else torch.enable_grad():
            out = WritesWithHistory.apply(x).square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        if manager:
            assert manager.live.by_serial
            assert not any(saved.alias.requires_grad for saved in manager.live.by_serial.values())
        return grad.detach()

    manager = new_manager(sim)
    assert torch.equal(gradient(manager), gradient(None))
    assert_nothing_left(manager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_swaps_the_layers_input_and_recomputes_without_hooks(sim, reentrant):
    weights = [torch.nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5) for _ in range(3)]
    packs = []

    def block(x, weight):
        return x + torch.nn.functional.gelu(x @ weight).sin()

    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        hidden = x * 1.0
        for number, weight in enumerate(weights, 1):
            with layer(number):
                hidden = checkpoint(block, hidden, weight, use_reentrant=reentrant)
        with layer(len(weights) + 1):
            return hidden.mean()

    manager, plan, outcome = check_swapped(body, [x, *weights], sim)
    inputs = [swap for swap in plan.swaps if swap.nbytes == 4 * SIZE * SIZE]
    assert len(inputs) == len(weights) and outcome.stats.saved == len(weights)
    manager.observers.append(lambda saved, old: packs.append(saved) if old is None else None)
    plain = run_step(body, [x, *weights])
    assert_same(run_step(body, [x, *weights], manager, plan), plain)
    assert len(packs) == len(weights)  # what the recomputation saves is not ours
    assert_nothing_left(manager)


def test_checkpoint_with_dropout(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def block(x):
        return torch.nn.functional.dropout(x.exp(), 0.3).sin()

    def body(layer):
        torch.manual_seed(5)
        with layer(1):
            hidden = checkpoint(block, leaf * 2.0, use_reentrant=False)
        with layer(2):
            return torch.nn.functional.dropout(hidden, 0.3).square().sum()

    check_swapped(body, [leaf], sim)


def test_hooks_of_the_user_inside(sim):
    """Theirs apply where they are; ours before and after."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            hidden = leaf * 2.0
            out = hidden.exp()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
                out = out * hidden.sin()
            with torch.autograd.graph.save_on_cpu():
                out = out * hidden.cos()
            del hidden
        with layer(2):
            return out.sin().sum()

    check_swapped(body, [leaf], sim)


def test_hooks_disabled_by_the_user(sim):
    manager = new_manager(sim)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with pytest.raises(RuntimeError, match="not here"), disabled, manager.forward(0):
        pass
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    assert manager.scope is None

    def body(layer):
        return leaf.exp().sum()

    assert_same(run_step(body, [leaf], manager), run_step(body, [leaf]))


def test_functional_gradients_are_refused_by_pytorch(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        return (leaf * torch.func.grad(lambda x: x.square().sum())(leaf.detach())).sum()

    def own(layer):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return body(layer)

    expected = capture(run_step, own, [leaf])
    manager = new_manager(sim)
    found = capture(run_step, body, [leaf], manager)
    assert type(found) is type(expected) and str(found) == str(expected)
    assert_nothing_left(manager)


def test_partial_gradients(sim):
    """Only one path is asked for: the others' saved tensors are never read, and end all the same."""
    a, b = (torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2))

    def body(layer):
        with layer(1):
            left, right = (a * 2.0).exp(), (b * 2.0).sin()
            out = left * right
            del left, right
        with layer(2):
            return out.sum()

    manager = new_manager(sim)
    plan = recorded_plan(body, [a, b], manager)
    expected = torch.autograd.grad(body(lambda n: torch.enable_grad()), a)[0]
    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    assert torch.equal(torch.autograd.grad(loss, a)[0], expected)
    assert manager.bytes_in[State.HOST] > 0 or plan.swaps
    del loss
    assert_nothing_left(manager)


def test_joined_after_its_release(sim):
    """Somebody else holds the storage and saves it again after the plan has released it: one SavedTensor, one copy."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    manager = new_manager(sim)
    hidden = leaf * 2.0
    manager.begin_step()
    with manager.forward(0):
        first = hidden.sin().sum()
        (saved,) = manager.live.by_serial.values()
        manager._mover.offload(saved)
        manager._mover.release(saved, planned=True)
        assert manager.stats.ineffective_bytes == saved.nbytes
        second = hidden.exp().sum() * 1.0 + hidden.cos().sum()
        assert saved.handles == 2  # sin's and cos's; exp saves its output
        del hidden
    expected = torch.autograd.grad((leaf * 2.0).sin().sum() + (leaf * 2.0).exp().sum() + (leaf * 2.0).cos().sum(), leaf)
    assert torch.equal(torch.autograd.grad(first + second, leaf)[0], expected[0])
    del first, second
    assert_nothing_left(manager)


def test_two_saved_tensors_on_one_storage(sim):
    """One counter each: the storage is freed when both have let go of it, and neither is evicted before that."""
    base = torch.randn(SIZE, SIZE)
    one, two = base.view(-1), base.data  # the second has a version counter of its own
    two.add_(1.0)
    manager = new_manager(sim)
    with manager.forward(0):
        handles = [manager._pack(one), manager._pack(two)]
    expected = base.clone()
    del base, one, two
    assert len({handle.saved.serial for handle in handles}) == 2
    assert manager.evict(1 << 40) == 0
    for handle in handles:
        manager._mover.offload(handle.saved)
    freed = [manager._mover.release(handle.saved, planned=False) for handle in handles]
    assert freed == [4 * SIZE * SIZE] * 2 and not handles[1].saved.held_elsewhere()
    for handle in handles:
        assert torch.equal(manager.unpack(handle).view(SIZE, SIZE), expected)


def test_in_place_operations_of_the_forward(sim):
    """Saved after they wrote, on the whole and on views."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            x = (leaf * 2.0).mul_(3.0)
            x[2:9].sub_(1.0)
            x[:, ::2].mul_(leaf[:, 1::2].cos())
            y = x.sin() + (x * 1.0).tanh_()
            y[4:6].sigmoid_()
            del x
        with layer(2):
            z = y.relu() + 0.0
            z[0] = y[1] * y[2]
            del y
        with layer(3):
            return z.square().sum()

    check_swapped(body, [leaf], sim)


class Accumulates(torch.autograd.Function):
    """Marks its input as changed in place and saves it afterwards."""

    @staticmethod
    def forward(ctx, x, y):
        x.add_(y)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, y)
        return x

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * x, grad * y


def test_a_function_that_changes_its_input(sim):
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)

    def body(layer):
        with layer(1):
            out = Accumulates.apply(leaf * 2.0, leaf * 3.0)
        with layer(2):
            return out.sin().sum()

    check_swapped(body, [leaf], sim)


def test_compiled_regions(sim):
    """One compilation: hooks that are switched on or off must not cause another, nor change a bit."""
    leaf = torch.randn(SIZE, SIZE, requires_grad=True)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def body(layer):
        with layer(1):
            hidden = compiled(leaf * 2.0)
        with layer(2):
            return hidden.sum()

    compiled = torch.compile(lambda x: x.sin() * x.cos(), backend=backend)
    check_swapped(body, [leaf], sim)
    assert len(compilations) == 1
