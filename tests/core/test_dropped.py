"""What a call drops in a light step is in no books: it must be found again there as it is where it is in them."""
import gc

import pytest
import torch
from swapping import MODEL, assert_nothing_left, new_manager

from mindspeed_swap.core.plan import Plan, Recompute, Swap
from mindspeed_swap.core.trace import BACKWARD, FORWARD, OUTSIDE, Key, ModuleKey, Position
from mindspeed_swap.sim import device

N = 64
BYTES = 4 * N * N


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.randn(N, N) / 8)


def plan_of(*names, swaps=()):
    return Plan(MODEL, 0, tuple(swaps), tuple(Recompute(ModuleKey(0, 0, OUTSIDE, name), 1, 1.0) for name in names))


def grads_of(body, leaf, sim, plan=None, light=False, wait=lambda manager: None):
    """(gradient, bytes held after forward). ``body``: of what calls a module, and of ``wait``, for the manager."""
    leaf.grad = None
    if plan is None:
        body(lambda name, function, *args, **how: function(*args), lambda: None).backward()
        return leaf.grad.clone(), 0
    manager = new_manager(sim)
    manager.begin_step(plan, light=light)
    before = device.memory_allocated()
    with manager.forward(0):
        loss = body(
            lambda name, function, *args, **how: manager.calls.call(name, function, args, {}, **how),
            lambda: wait(manager),
        )
    manager.drain()
    held = device.memory_allocated() - before
    loss.backward()
    manager.end_step()
    del loss
    assert_nothing_left(manager)
    return leaf.grad.clone(), held


def assert_alike(body, leaf, sim, plan, wait=lambda manager: None):
    """The same gradient as without a manager, and as many bytes held whether the step is light or not."""
    right, _ = grads_of(body, leaf, sim)
    found = [grads_of(body, leaf, sim, plan, light, wait) for light in (False, True)]
    assert all(torch.equal(grad, right) for grad, _ in found)
    assert found[1][1] <= found[0][1] < found[0][1] + BYTES
    return found[1][1]


@pytest.mark.parametrize("of", [
    lambda z: torch.conj(z) * z.abs(), lambda z: z.real + z.conj().imag * z.abs(),
], ids=["conjugate", "negative"])  # fmt: skip
def test_a_view_that_is_not_ours_to_move_is_not_dropped_with_its_storage(sim, of):
    leaf = torch.nn.Parameter(torch.randn(N, N, dtype=torch.complex64) / 8)

    def body(call, wait):
        def module(given):
            hidden = given * 1.5
            return hidden * hidden + of(hidden) * given

        return call("m", module, leaf).abs().square().sum()

    assert_alike(body, leaf, sim, plan_of("m"))


def test_what_has_the_memory_of_another_version_is_another(sim, weight):
    """``data`` has a version counter of its own."""

    def body(call, wait):
        kept = []

        def module(given):
            hidden = given * 1.5
            kept.append((hidden.sin(), hidden))
            return hidden.cos()

        call("m", module, weight, keeps_outputs=True)
        sine, hidden = kept.pop()
        data = hidden.data
        with torch.no_grad():
            hidden.add_(1)
        loss = ((weight * 1.0).exp() * data).sum()
        loss.sine = sine  # what was saved for it lives
        return loss

    assert_alike(body, weight, sim, plan_of("m"))


def leaked(call, weight, wait):
    """The call's hidden state is used outside of it too."""
    kept = []

    def module(given):
        kept.append((given * 1.5).tanh())
        return kept[0].sin()

    made = call("m", module, weight, keeps_outputs=True)
    wait()
    return (kept.pop().cos() * made).sum()


def change_plan(manager):
    manager.change_plan(plan_of("m"), light=manager._is_light)


@pytest.mark.parametrize("wait", [lambda manager: None, lambda manager: manager.evict(1), change_plan])
def test_what_others_save_of_it_is_dropped_too_whatever_comes_between(sim, weight, wait):
    held = assert_alike(lambda call, waits: leaked(call, weight, waits), weight, sim, plan_of("m"), wait)
    assert held < 3 * BYTES


@pytest.mark.parametrize("anchor", [1, 2, 3])
def test_where_the_plan_does_something_else_too(sim, weight, anchor):
    def body(call, wait):
        other = (weight * 2).exp()
        return leaked(call, weight, wait) + (other * other).sum()

    where = Position(FORWARD, 0, 0, OUTSIDE, anchor), Position(BACKWARD, 0, 0, OUTSIDE, anchor)
    assert_alike(body, weight, sim, plan_of("m", swaps=[Swap(Key(0, 0, OUTSIDE, 0), BYTES, *where)]))


def test_the_first_one_may_die_before_the_others(sim, weight):
    def body(call, wait):
        kept = []

        def module(given):
            hidden = given * 1.5
            first, made = hidden.sin(), hidden.cos()
            kept.append(hidden)
            del first
            return made

        made = call("m", module, weight, keeps_outputs=True)
        return (kept.pop().sin() * made).sum()

    assert_alike(body, weight, sim, plan_of("m"))


@pytest.mark.parametrize("light", [False, True])
def test_what_another_call_is_run_from_is_pushed_out_once_it_is_made_again(sim, weight, light):
    manager = new_manager(sim)
    manager.begin_step(plan_of("a", "b"), light=light)
    with manager.forward(0):
        given = manager.calls.call("a", lambda given: (given * 1.5).tanh(), (weight,), {})
        loss = manager.calls.call("b", lambda given: (given * 2).exp(), (given,), {}).sum()
        other = given.sin()
    del given
    other.sum().backward(retain_graph=True)  # a runs again, b does not
    del other
    gc.collect()
    before = device.memory_allocated()
    assert manager.evict(1 << 40) == BYTES == before - device.memory_allocated()
    loss.backward()
    manager.end_step()


@pytest.mark.parametrize("light", [False, True])
def test_of_a_graph_of_the_last_step_nothing_takes_a_name_of_this_one(sim, weight, light):
    manager = new_manager(sim)

    def step(plan):
        manager.begin_step(plan, light=light)
        with manager.forward(0):
            return manager.calls.call("m", lambda given: (given * 1.5).tanh().sin(), (weight,), {}).sum()

    old, new = step(plan_of("m")), step(None)
    grad = torch.autograd.grad(old, weight, retain_graph=True)[0]
    manager.evict(1)
    nameless = [saved for saved in manager.live.by_serial.values() if manager.live.by_key.get(saved.key) is not saved]
    assert len(nameless) == (0 if light else 1), "there the old one is in the books, and in no name"
    assert torch.equal(torch.autograd.grad(new, weight)[0], grad)
    del old, new, nameless
    manager.end_step()
    assert_nothing_left(manager)


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda given: given.requires_grad_().exp()])
def test_a_call_that_gives_what_it_did_not_make_is_not_kept_for_it(sim, weight, kind, light):
    there, manager = kind(torch.randn(N, N)), new_manager(sim)

    def step():
        manager.begin_step(plan_of("m"), light=light)
        with manager.forward(0):
            made, _ = manager.calls.call("m", lambda given: ((given * 1.5).sin(), there), (weight * 1.0,), {})
            made.sum().backward()
        manager.end_step()

    gc.disable()
    try:
        step()
        manager.begin_step(light=light)
        held = device.memory_allocated()
        for _ in range(3):
            step()
            manager.begin_step(light=light)
        assert device.memory_allocated() == held
    finally:
        gc.enable()
    manager.drain()
    assert not any(manager.bytes_in.values())
