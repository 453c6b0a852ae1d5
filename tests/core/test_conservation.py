"""Bytes are conserved: at every event of a run what is on the device, on the host and under way adds up to what is
alive, in the manager's books, the host pool's and the ledger's alike; and no content is ever lost."""
import random
import threading

import pytest
import torch
from swapping import (
    Ledger,
    assert_nothing_left,
    assert_same,
    blocks,
    capacity,
    new_manager,
    recorded_plan,
    run_step,
    settle,
)

from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.trace import BACKWARD, FORWARD, Key, Position
from mindspeed_swap.sim import device


def test_every_event_of_a_step_under_plan_pressure_and_death(sim):
    body, leaves = blocks(6)
    plain = run_step(body, leaves)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=3)
    ledger = Ledger(manager)
    device.set_link(0.5, 0.5)
    assert_same(run_step(body, leaves, manager, plan), plain)
    manager.on_interval = lambda interval: manager.evict(100 << 10)
    assert_same(run_step(body, leaves, manager, plan), plain)
    manager.on_interval = None
    device.set_link(0.01, 0.01)
    with manager.forward(0):  # dies with its copies under way
        loss = body(manager.layer)
    manager.begin_step(plan)
    with manager.forward(0):
        loss = body(manager.layer)
    del loss
    assert_nothing_left(manager)
    ledger.check()
    kept, leaving, host, returning, dead = State.DEVICE, State.LEAVING, State.HOST, State.RETURNING, State.DEAD
    way = {(None, kept), (kept, leaving), (leaving, host), (host, returning), (returning, kept), (kept, dead)}
    assert set(ledger.events) >= way | {(host, dead)}


def random_plan(plan: Plan, positions: list[Position], rng: random.Random) -> Plan:
    swaps = []
    for swap in plan.swaps:
        if rng.random() < 0.7:
            nbytes = swap.nbytes + (rng.random() < 0.1)  # made for another shape
            swaps.append(Swap(swap.key, nbytes, rng.choice(positions), rng.choice(positions)))
    return Plan(plan.model, 0, tuple(swaps))


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_capacities_and_links(sim, seed):
    """Nonsense plans included: whatever happens to a tensor, it is read as it was saved."""
    rng = random.Random(seed)
    body, leaves = blocks(rng.randint(2, 6), width=rng.choice((16, 40)), tokens=rng.choice((24, 64)), seed=seed)
    microbatches = rng.randint(1, 2)
    plain = run_step(body, leaves, microbatches=microbatches)
    manager = new_manager(sim, host_bytes=rng.choice((96 << 10, 8 << 20)))
    trace = run_step(body, leaves, manager, record=True, microbatches=microbatches).trace
    full = recorded_plan(body, leaves, manager)
    Ledger(manager)
    guard = OomGuard(manager, hook=rng.random() < 0.7)
    base = device.memory_allocated()
    positions = [point.position for point in trace.points] + [Position("F", 7, 7, 7, 7)]
    order = {record.key: record.first_read or 0 for record in trace.saved}
    survived = 0
    for _ in range(4):
        device.set_link(rng.choice((0, 0.05, 5)), rng.choice((0, 0.05, 5)))
        limit = base + int((plain.peak_bytes - base) * rng.uniform(0.4, 1.2))
        outcome = None
        try:
            with capacity(limit):
                outcome = run_step(
                    body, leaves, manager, random_plan(full, positions, rng), microbatches=microbatches,
                    record=rng.random() < 0.5, read_order=order if rng.random() < 0.5 else None,
                )  # fmt: skip
        except torch.OutOfMemoryError:
            pass
        if outcome is None:  # not in the except block, where the traceback still holds the graph
            torch.ones(1, requires_grad=True).sum().backward()  # the engine lets go of what it did not get to
            settle(manager)
            continue
        assert outcome.peak_bytes <= limit
        assert_same(outcome, plain)
        survived += 1
    assert survived > 0
    guard.close()
    assert_nothing_left(manager)


@pytest.mark.parametrize("seed", range(6))
def test_random_moves_of_many_tensors(sim, seed):
    """The hooks called directly, in any order: saved, joined, moved, read, changed through `.data`, dropped."""
    rng = random.Random(seed)
    manager = new_manager(sim, host_bytes=200 << 10)
    Ledger(manager)
    handles: list[tuple[object, torch.Tensor]] = []
    keep: list[torch.Tensor] = []
    for _ in range(250):
        action = rng.choice(("pack", "pack", "join", "read", "read", "write", "drop", "evict", "move", "hold"))
        if action == "pack" and len(handles) < 30:
            tensor = torch.randn(rng.randint(300, 5000))
            with device.host_memory():
                expected = tensor.clone()
            with manager.forward(0):
                handles.append((manager._pack(tensor), expected))
            if rng.random() < 0.3:
                keep.append(tensor)
        elif action == "hold":
            keep[:] = keep[-2:]
        elif action == "evict":
            manager.evict(rng.choice((1, 10_000, 1 << 40)))
        elif not handles:
            continue
        else:
            index = rng.randrange(len(handles))
            handle, expected = handles[index]
            if action == "drop":
                handles.pop(index)
            elif action == "join":
                if handle.saved.state is State.DEVICE and handle.whole:
                    view = handle.saved.alias[5:]
                    with manager.forward(0):
                        handles.append((manager._pack(view), expected[5:]))
                    assert handles[-1][0].saved is handle.saved
            elif action == "move":
                saved = handle.saved
                if saved.state is State.DEVICE:
                    manager._mover.offload(saved)
                elif saved.state is State.LEAVING:
                    manager._mover.release(saved, planned=True)
                elif saved.state is State.HOST:
                    manager._prefetch(saved)
            else:
                found = manager.unpack(handle)
                assert torch.equal(found, expected)
                if action == "write":
                    found.data.neg_()
                    expected.neg_()
                if rng.random() < 0.2:
                    keep.append(found)
            del handle
    found = view = tensor = saved = None
    for handle, expected in handles:
        assert torch.equal(manager.unpack(handle), expected)
    del handle, found, view, tensor, saved
    handles.clear()
    keep.clear()
    assert_nothing_left(manager)


def test_threads_that_save_read_and_evict(sim):
    """What one thread loads, pressure in another may push out before it is read."""
    manager = new_manager(sim)
    Ledger(manager)
    errors: list[BaseException] = []
    done = threading.Event()

    def reads(seed: int) -> None:
        try:
            rng = random.Random(seed)
            handles = []
            for _ in range(120):
                tensor = torch.full((600,), float(rng.random()))
                handles.append((manager._pack(tensor), float(tensor[0])))
                del tensor
                if len(handles) > 6:
                    handles.pop(rng.randrange(len(handles)))
                handle, value = rng.choice(handles)
                assert bool((manager.unpack(handle) == value).all())
                del handle
        except BaseException as error:
            errors.append(error)

    def evicts() -> None:
        try:
            while not done.is_set():
                manager.evict(1 << 40)
        except BaseException as error:
            errors.append(error)

    with manager.forward(0):
        threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(3)]
        evictor = threading.Thread(target=evicts)
        for thread in (*threads, evictor):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        evictor.join()
    assert not errors, errors
    assert_nothing_left(manager)


def test_a_tensor_pushed_out_between_load_and_read_is_loaded_again(sim, monkeypatch):
    manager = new_manager(sim)
    tensor = torch.randn(64, 64)
    expected = tensor.clone()
    with manager.forward(0):
        handle = manager._pack(tensor)
    del tensor
    assert manager.evict(1 << 40)
    load, loads = manager._mover.load, []

    def loses_it_twice(saved):
        load(saved)
        loads.append(saved)
        if len(loads) < 3:
            thread = threading.Thread(target=manager.evict, args=(1 << 40,))
            thread.start()
            thread.join()
            assert saved.state is State.HOST

    monkeypatch.setattr(manager._mover, "load", loses_it_twice)
    assert torch.equal(manager.unpack(handle), expected)
    assert len(loads) == 3


def test_memory_of_the_dead_counts_as_freed(sim):
    """Pressure finds nothing to evict, but tensors whose end nobody has noticed yet: that is room too."""
    manager = new_manager(sim)
    OomGuard(manager)
    with manager.forward(0):
        handles = [manager._pack(torch.randn(64, 64)) for _ in range(4)]
    with capacity(device.memory_allocated()):
        handles.clear()
        assert torch.empty(4 * 64 * 64).numel() == 4 * 64 * 64
    assert manager.stats.evictions == 0
    with manager.forward(0):
        handles = [manager._pack(torch.randn(64, 64)) for _ in range(4)]
    handles.clear()
    assert manager.evict(1) == 4 * 64 * 64 * 4


def test_waits_are_on_the_stream_the_memory_belongs_to(sim, monkeypatch):
    """A thread on another stream runs out of memory: what it pushes out goes back to the stream it was made on."""
    other = -7
    current = [-1]
    waits: list[int] = []
    wait = sim.wait

    def listening(stream, event):
        waits.append(stream)
        wait(-1 if stream < 0 else stream, event)

    monkeypatch.setattr(sim, "compute_stream", lambda: current[0])
    monkeypatch.setattr(sim, "wait", listening)
    record = sim.record
    monkeypatch.setattr(sim, "record", lambda stream: record(-1 if stream < 0 else stream))
    manager = new_manager(sim)
    device.set_link(0.05, 0.05)
    tensor = torch.randn(64, 64)
    with manager.forward(0):
        handle = manager._pack(tensor)
    expected = tensor.clone()
    del tensor
    current[0] = other
    assert manager.evict(1 << 40) > 0
    assert -1 in waits and other not in waits
    manager._prefetch(handle.saved)  # its buffer would belong to a stream that does not read it
    assert handle.saved.state is State.HOST and manager.stats.skipped_prefetches == 1
    current[0] = -1
    manager._prefetch(handle.saved)
    assert handle.saved.state is State.RETURNING
    current[0] = other
    waits.clear()
    assert manager.evict(1 << 40) > 0 and waits == [-1]
    current[0] = -1
    assert torch.equal(manager.unpack(handle), expected)


def test_keys_are_counted_before_any_filter(sim):
    """A size threshold never renumbers what a plan names."""
    manager = new_manager(sim)
    with manager.forward(3, 1), manager.layer(2):
        manager._pack(torch.randn(2))
        handle = manager._pack(torch.randn(64, 64))
        manager._pack(torch.nn.Parameter(torch.randn(64, 64)))
        last = manager._pack(torch.randn(64, 64))
    assert [handle.key, last.key] == [Key(3, 1, 2, 1), Key(3, 1, 2, 3)]
    assert {FORWARD, BACKWARD} == {"F", "B"}


def test_memory_does_not_depend_on_how_far_the_host_is_ahead(sim, monkeypatch):
    """On a GPU the host is often a whole phase ahead, and finds no copy done: streams order memory, not the host."""
    body, leaves = blocks(6)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, prefetch=2)
    peak = run_step(body, leaves, manager, plan).peak_bytes
    monkeypatch.setattr(sim, "done", lambda event: False)
    assert run_step(body, leaves, manager, plan).peak_bytes == peak
    assert manager._mover.lingering == []
