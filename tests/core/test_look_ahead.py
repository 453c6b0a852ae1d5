"""What pressure pushed out comes back before backward wants it. What a plan names is moved whatever its size is."""
import torch
from swapping import assert_nothing_left, assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.core.strays import LOOK_AHEAD_READS
from mindspeed_swap.sim import device


def pushed_out(manager, body, leaves, order):
    """A step, all of whose tensors are evicted at the end of forward."""
    plain = run_step(body, leaves)

    def evicting(layer):
        loss = body(layer)
        manager.evict(1 << 40)
        return loss

    outcome = run_step(evicting, leaves, manager, read_order=order)
    assert_same(outcome, plain)
    return outcome.stats


def read_order(manager, body, leaves):
    trace = run_step(body, leaves, manager, record=True).trace
    return {record.key: record.first_read for record in trace.saved if record.first_read is not None}


def test_all_but_the_first_are_back_in_time(sim):
    body, leaves = blocks(4)
    manager = new_manager(sim)
    order = read_order(manager, body, leaves)
    stats = pushed_out(manager, body, leaves, order)
    assert stats.evictions >= 8
    assert stats.on_demand_loads == 1  # nothing is read before it
    assert stats.skipped_prefetches == 0
    assert_nothing_left(manager)


def test_without_an_order_everything_is_loaded_on_demand(sim):
    body, leaves = blocks(4)
    manager = new_manager(sim)
    stats = pushed_out(manager, body, leaves, None)
    assert stats.on_demand_loads == stats.evictions >= 8


def test_no_room_no_look_ahead(sim):
    """It never pushes out anything, and leaves the room to what is computed."""
    body, leaves = blocks(4)
    manager = new_manager(sim)
    order = read_order(manager, body, leaves)
    manager.begin_step(read_order=order)
    with manager.forward(0):
        loss = body(manager.layer)
        manager.evict(1 << 40)
    device.set_capacity(device.memory_allocated() + 16)
    key = next(iter(sorted(order, key=order.__getitem__)))
    manager.look_ahead(key)
    assert manager.stats.loaded_bytes == 0 and manager.stats.skipped_prefetches == 0
    device.set_capacity(64 << 30)
    manager.look_ahead(key)
    assert manager.stats.loaded_bytes > 0
    loss.backward()
    manager.end_step()


def test_as_far_as_one_layer(sim):
    body, leaves = blocks(3 * LOOK_AHEAD_READS, width=32, tokens=32)
    manager = new_manager(sim)
    order = read_order(manager, body, leaves)
    manager.begin_step(read_order=order)
    with manager.forward(0):
        loss = body(manager.layer)
        manager.evict(1 << 40)
    manager.look_ahead(next(iter(sorted(order, key=order.__getitem__))))
    assert 0 < manager.stats.loaded_bytes <= LOOK_AHEAD_READS * 32 * 64 * 4
    loss.backward()
    manager.end_step()


def test_a_plan_moves_its_tensors_whatever_their_size(sim):
    weight = torch.nn.Parameter(torch.randn(32, 32))
    tokens = [64]

    def body(layer):
        with layer(1):
            hidden = torch.ones(tokens[0], 32) @ weight
            return hidden.sigmoid().exp().sum()

    manager = new_manager(sim)
    plan = recorded_plan(body, [weight], manager)
    for tokens[0] in (80, 48):
        plain = run_step(body, [weight])
        outcome = run_step(body, [weight], manager, plan)
        assert_same(outcome, plain)
        assert outcome.stats.offloaded_bytes == plan.swap_bytes * tokens[0] // 64
