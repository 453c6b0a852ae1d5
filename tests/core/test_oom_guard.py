"""Out of memory is survived by eviction: inside the allocator where it can call us, ahead of it where it cannot."""
import pytest
import torch
from swapping import assert_nothing_left, assert_same, blocks, capacity, new_manager, run_step

from mindspeed_swap.core.accelerator.base import Interval
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.sim import device
from mindspeed_swap.units import GIB, MIB


def limit(plain, base: int, share: float) -> int:
    return base + int((plain.peak_bytes - base) * share)


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_step_at_60_percent_of_its_peak(sim, hook, ordered):
    body, leaves = blocks(8, width=64, tokens=128)
    plain = run_step(body, leaves)
    for leaf in leaves:
        leaf.grad = None
    base = device.memory_allocated()
    manager = new_manager(sim)
    trace = run_step(body, leaves, manager, record=True).trace
    order = {record.key: record.first_read for record in trace.saved if record.first_read} if ordered else None
    guard = OomGuard(manager, hook=hook)
    assert guard.ahead != hook
    calls = count_calls(leaves, body)
    for leaf in leaves:
        leaf.grad = None
    cap = limit(plain, base, 0.6)
    with capacity(cap):
        with pytest.raises(torch.OutOfMemoryError):  # it is a real limit
            guard.close()
            run_step(body, leaves)
        torch.ones(1, requires_grad=True).sum().backward()
        guard = OomGuard(manager, hook=hook)
        for _ in range(2):
            outcome = run_step(calls.body, leaves, manager, read_order=order)
            assert outcome.peak_bytes <= cap
            assert outcome.stats.evictions > 0
            assert_same(outcome, plain)
    assert calls.count == 2  # nothing is executed twice
    guard.close()
    assert_nothing_left(manager)


class count_calls:
    def __init__(self, leaves, body):
        self._body, self.count = body, 0

    def body(self, layer):
        self.count += 1
        return self._body(layer)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_pressure_in_each_phase(sim, phase):
    body, leaves = blocks(6, width=64, tokens=128)
    plain = run_step(body, leaves)
    for leaf in leaves:
        leaf.grad = None
    manager = new_manager(sim)
    guard = OomGuard(manager)
    manager.begin_step()
    evicted = manager.stats

    def tight():
        """No room for anything more."""
        device.set_capacity(device.memory_allocated() + 1024)

    with manager.forward(0):
        if phase == "forward":
            hidden = body(manager.layer)
            tight()
            # another forward of the same size fits where the first one's tensors were
            loss = hidden + 0.0 * body(manager.layer)
        else:
            loss = body(manager.layer)
    if phase == "backward":
        tight()
    if phase == "optimizer":
        tight()
        torch.empty(1 << 16)
        device.set_capacity(64 << 30)
    if phase == "forward":
        device.set_capacity(64 << 30)
    loss.backward()
    assert evicted.evictions > 0
    if phase != "forward":
        for leaf, grad in zip(leaves, plain.grads, strict=True):
            assert torch.equal(leaf.grad, grad)
    guard.close()
    del loss
    device.set_capacity(64 << 30)
    if phase == "forward":
        del hidden
    assert_nothing_left(manager)


def test_a_hopeless_request_is_an_error_and_the_tensors_live(sim):
    manager = new_manager(sim)
    guard = OomGuard(manager)
    leaf = torch.randn(64, 64, requires_grad=True)
    with manager.forward(0):
        loss = (leaf * 2.0).sin().sum()
    with capacity(device.memory_allocated() + 100), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30)
    expected = torch.autograd.grad((leaf * 2.0).sin().sum(), leaf)[0]
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], expected)
    guard.close()


def test_ahead_of_a_need_that_nobody_has_seen_yet_a_sixteenth_is_free(sim, monkeypatch):
    manager, asked = new_manager(sim), []
    monkeypatch.setattr(manager, "evict", asked.append)
    base = device.memory_allocated()
    with capacity(base + 16 * MIB):
        guard = OomGuard(manager, hook=False)
        least = (base + 16 * MIB) // 16
        full = torch.empty(16 * MIB - least // 4, dtype=torch.uint8)
        manager.on_interval(Interval(0, 0))  # which needed nothing
        assert asked == [least - (16 * MIB - full.numel())]
        guard.close()


def test_the_order_of_eviction(sim):
    """What backward needs last goes first; without an order, what was saved first."""
    manager = new_manager(sim)

    def evicted(order):
        manager.begin_step(read_order=order)
        with manager.forward(0):
            handles = [manager._pack(torch.randn(64, 64)) for _ in range(3)]
        went = []
        while manager.evict(1):
            went += [i for i, h in enumerate(handles) if h.saved.state.value == "host" and i not in went]
        return went

    assert evicted(None) == [0, 1, 2]
    keys = [(0, 0, 0, i) for i in range(3)]
    assert evicted({keys[0]: 7, keys[1]: 9, keys[2]: 8}) == [1, 2, 0]


def test_only_what_would_free_memory(sim):
    manager = new_manager(sim)
    held, free = torch.randn(64, 64), torch.randn(64, 64)
    view = held[3:5]
    with manager.forward(0):
        handles = [manager._pack(held), manager._pack(free)]
    del held, free
    assert manager.evict(1 << 40) == 64 * 64 * 4
    assert [handle.saved.state.value for handle in handles] == ["device", "host"]
    del view
    assert manager.evict(1 << 40) == 64 * 64 * 4


def test_a_prefetch_does_not_push_others_out(sim):
    manager = new_manager(sim)
    guard = OomGuard(manager)
    with manager.forward(0):
        handles = [manager._pack(torch.randn(64, 64)) for _ in range(2)]
    assert manager.evict(1) == 64 * 64 * 4
    with capacity(device.memory_allocated() + 100):
        manager._prefetch(handles[0].saved)
        assert manager.stats.skipped_prefetches == 1
        assert [handle.saved.state.value for handle in handles] == ["host", "device"]
        manager.unpack(handles[0])  # on demand it does
        assert [handle.saved.state.value for handle in handles] == ["device", "host"]
    guard.close()


@pytest.mark.parametrize(("world", "first"), [("1", 2.0), ("8", 2.5)])
def test_the_first_step_leaves_room_to_others(sim, monkeypatch, world, first):
    """40 GiB: a sixteenth of it is 2.5 GiB."""
    left = []
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setattr(sim, "leave_room", left.append)
    monkeypatch.setattr(sim, "empty_cache", lambda: left.append("cache"))
    with capacity(40 * GIB):
        guard = OomGuard(new_manager(sim))
        for _ in range(3):
            assert guard.begin_step() == 40 * GIB
            guard.enter_optimizer()
    assert left == [first * GIB, "cache", 0.5 * GIB]
    guard.close()


def test_the_room_is_taken_when_nothing_is_left_to_evict(sim, monkeypatch):
    order = []
    manager = new_manager(sim)
    monkeypatch.setattr(manager, "evict", lambda nbytes: order.append("evict") or (10 if len(order) == 1 else 0))
    monkeypatch.setattr(sim, "take_room", lambda: order.append("room") or order.count("room") == 1)
    guard = OomGuard(manager)
    assert [guard._on_pressure(10, attempt) for attempt in range(3)] == [True, True, False]
    assert order == ["evict", "evict", "room", "evict", "room"]
    with manager.evicting.off():
        assert not guard._on_pressure(10, 0)
    assert order[5:] == ["evict"], "an allocation that may as well fail takes nothing"
    guard.close()
