"""Loose tensors: what no plan wants passes by name only, and is pushed out as readily as anything if need be."""
import gc

import pytest
import torch
from swapping import (
    MODEL,
    assert_equal_bits,
    assert_nothing_left,
    blocks,
    capacity,
    new_manager,
    new_trace,
    recorded_plan,
    run_step,
)

from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Agenda, Plan, Recompute, Swap
from mindspeed_swap.core.trace import (
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    OUTSIDE,
    Key,
    ModuleKey,
    Position,
    pointwise_of,
)
from mindspeed_swap.sim import device

SIZE, WIDE = 32, 64
WIDE_BYTES = 4 * WIDE * WIDE
both = pytest.mark.parametrize("light", [False, True])


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
        assert len(plan.swaps) <= stats.saved <= len(Agenda(plan).saves) < stats.saves
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


# ---- memory that is short inside an operator, where ``detach`` makes aliases with a version counter of their own
@pytest.fixture
def leaves():
    return torch.randn(WIDE, WIDE, requires_grad=True), torch.randn(8 * WIDE, WIDE, requires_grad=True)


def with_little_room(large):
    with capacity(device.memory_allocated() + 8 * WIDE_BYTES - 1000):
        return (large * 3.0).sum()


@pytest.fixture
def guarded(sim):
    manager = new_manager(sim)
    guard = OomGuard(manager)
    yield manager
    guard.close()


@both
@pytest.mark.parametrize("others", [False, True])
def test_one_that_was_changed_in_place_before_it_was_saved_is_pushed_out_and_read(guarded, leaves, light, others):
    leaf, large = leaves

    def forward(tight):
        changed = (leaf * 2.0).mul_(3.0)
        total = changed.sin().sum()
        del changed
        if others:
            total = total + (leaf * 4.0).cos().sum()
        return total + (with_little_room(large) if tight else (large * 3.0).sum())

    expected, = torch.autograd.grad(forward(False), leaf)
    guarded.begin_step(light=light)
    with guarded.forward(0):
        loss = forward(True)
    assert guarded.stats.evictions > 0
    assert_equal_bits(torch.autograd.grad(loss, leaf)[0], expected)


@both
def test_a_change_in_place_after_it_was_pushed_out_is_an_error(guarded, leaves, light):
    leaf, large = leaves
    guarded.begin_step(light=light)
    with guarded.forward(0):
        changed = leaf * 2.0
        loss = changed.sin().sum() + (leaf * 4.0).cos().sum()
        loss = loss + with_little_room(large)
        with torch.no_grad():
            changed.zero_()
    assert guarded.stats.evictions > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


@both
@pytest.mark.parametrize("next_step", [False, True])
def test_of_a_retained_graph_they_are_pushed_out_too(guarded, leaves, light, next_step):
    leaf, _ = leaves
    guarded.begin_step(light=light)
    with guarded.forward(0):
        result = (leaf * 2.0).sin().sum()
    first, = torch.autograd.grad(result, leaf, retain_graph=True)
    with device.host_memory():
        first = first.clone()
    if next_step:
        guarded.end_step()
        guarded.begin_step(light=light)
    gc.collect()
    with capacity(device.memory_allocated() + 1000):
        other = leaf.detach() * 1.0
    del other
    assert guarded.stats.evictions == 1
    assert_equal_bits(torch.autograd.grad(result, leaf)[0], first)


@both
def test_one_that_is_planned_under_its_second_name_is_not_there_twice(sim, leaves, light):
    leaf, _ = leaves
    manager = new_manager(sim)
    away = Swap(Key(0, 0, OUTSIDE, 1), WIDE_BYTES, Position(FORWARD, 0, 0, 1, ENTER), Position(FORWARD, 0, 0, 1, EXIT))
    manager.begin_step(Plan(MODEL, 0, (away,)), light=light)
    with manager.forward(0):
        twice = leaf * 2.0
        result = twice.sin().sum() + twice.cos().sum()
        del twice
        before = device.memory_allocated()
        with manager.layer(1):
            pass
        assert device.memory_allocated() <= before
    expected, = torch.autograd.grad((leaf * 2.0).sin().sum() + (leaf * 2.0).cos().sum(), leaf)
    assert_equal_bits(torch.autograd.grad(result, leaf)[0], expected)


@both
def test_a_recording_that_begins_in_the_middle_knows_nothing_of_earlier_ones(sim, leaves, light):
    leaf, _ = leaves
    manager = new_manager(sim)
    manager.begin_step(light=light)

    def inner():
        value = (leaf * 3.0).sin().sum()
        manager.evict(1 << 40)
        return value

    with manager.forward(0):
        early = (leaf * 2.0).sin().sum()
        manager.change_plan(None, trace=new_trace(), light=light)
        with manager.layer(1):
            late = manager.calls.call("mlp", inner, (), {})
    (early + late).backward()
    _, trace = manager.end_step()
    assert [record.key.layer for record in trace.saved] == [1]
    assert [key.layer for module in trace.modules for key in module.frees] == [1]


@both
def test_a_plan_that_comes_in_the_middle_acts_where_earlier_ones_are_read(sim, leaves, light):
    leaf, _ = leaves
    manager = new_manager(sim)
    manager.begin_step(light=light)
    read = Position(BACKWARD, 0, 0, OUTSIDE, 0)
    away = Swap(Key(0, 0, 1, 0), WIDE_BYTES, Position(FORWARD, 0, 0, 1, EXIT), read)
    with manager.forward(0):
        early = (leaf * 2.0).sin().sum()
        manager.change_plan(Plan(MODEL, 0, (away,)), light=light)
        with manager.layer(1):
            late = (leaf * 3.0).sin().sum()
    torch.autograd.grad(early, leaf)
    torch.autograd.grad(late, leaf)
    stats, _ = manager.end_step()
    assert stats.loaded_bytes == WIDE_BYTES and stats.on_demand_loads == 0


@both
def test_what_a_dropped_tensor_is_made_from_goes_with_it(sim, light):
    weight, inputs = torch.nn.Parameter(torch.randn(WIDE, WIDE) / 8), torch.randn(WIDE, WIDE)
    manager = new_manager(sim)

    def call(name, function, *args):
        return manager.calls.call(name, function, args, {})

    def outer(hidden):
        return torch.exp(0.1 * call("inner", lambda given: given, torch.exp(hidden)))

    plan = Plan(MODEL, 0, (), (Recompute(pointwise_of(ModuleKey(0, 0, 1, "outer")), 1, 0.0),))
    gc.disable()
    try:
        manager.begin_step(plan, light=light)
        with manager.forward(0), manager.layer(1):
            loss = call("outer", outer, inputs @ weight).square().mean()
        del loss
        manager.begin_step(light=light)
        assert not any(manager.bytes_in.values())
    finally:
        gc.enable()


def test_after_a_call_that_runs_again_what_no_plan_wants_is_still_loose(sim):
    """As long as somebody has what it gave; only that itself need not be kept."""
    weights = [torch.nn.Parameter(torch.randn(WIDE, WIDE) / 8) for _ in range(4)]
    inputs, manager = torch.randn(WIDE, WIDE), new_manager(sim)
    there = []

    def body(layer):
        with layer(1):
            given = inputs @ weights[1]
            hidden = manager.calls.call("first", lambda given: (given @ weights[0]).sin(), (given,), {})
            there.append(hidden)
            return torch.tanh((hidden @ weights[2]).exp() @ weights[3]).square().mean()

    plain = run_step(body, weights)
    there.clear()
    plan = Plan(MODEL, 0, (), (Recompute(ModuleKey(0, 0, 1, "first"), 1, 0.0),))
    stats = light_step(body, weights, manager, plan)
    assert len(there) == 1 and stats.recomputed_calls == 1
    assert stats.saves > 7 and stats.saved == 2, "what the call is run from, and what it gave"
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(weights, plain.grads, strict=True))
