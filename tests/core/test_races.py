"""Each wait of the manager is needed: with it the bytes are right and no memory is freed under a copy, without it not.

Copies are slowed down, so that whoever does not wait loses for certain. Compute of the simulated device is on the host
and is over when the call returns; two waits are for copies that must not overtake compute and cannot fail here.
"""
from __future__ import annotations

import pytest
import torch
from swapping import new_manager

from mindspeed_swap.core.accelerator.sim import COMPUTE, SimAccelerator
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, Key, Position
from mindspeed_swap.core.waits import Wait
from mindspeed_swap.sim import device

NUMBERS = 512 << 10  # 2 MiB: the simulated link moves a MiB at a time, so that the last is read late
SLOW, FAST = 0.02, 0.0  # 10^9 bytes per second: 50 ms per MiB; 0 is as fast as memory
NOT_SHOWN = {Wait.OFFLOAD_AFTER_COMPUTE, Wait.LOAD_AFTER_COMPUTE}
END = Position(FORWARD, 0, 0, OUTSIDE, EXIT)
NEVER = Position("O", 0, 0, 7, 7)


class RunAhead(SimAccelerator):
    """Once ``ahead``, the host does not wait for what compute waits for, as on a real device, until ``catch_up``."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = False
        self._before_compute: list = []

    def wait(self, stream, event) -> None:
        if stream == COMPUTE and self.ahead:
            self._before_compute.append(event)
        else:
            super().wait(stream, event)

    def catch_up(self) -> None:
        for event in self._before_compute:
            self.synchronize(event)
        self._before_compute.clear()


def content(seed: int) -> torch.Tensor:
    with device.host_memory():
        return torch.arange(NUMBERS, dtype=torch.float32) + seed * NUMBERS


def on_device(seed: int) -> torch.Tensor:
    return content(seed) + 0.0


def plan_of(*ordinals: int, release: Position = END) -> Plan:
    swaps = (Swap(Key(0, 0, OUTSIDE, ordinal), 4 * NUMBERS, release, NEVER) for ordinal in ordinals)
    return Plan("test", 0, tuple(swaps))


def save(manager, *tensors: torch.Tensor) -> list:
    """Saved and, under a plan, released at the end of forward. The caller gives its references up."""
    with manager.forward(0):
        return [manager._pack(tensor) for tensor in tensors]


def release_after_offload(waits) -> bool:
    device.set_link(SLOW, FAST)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0))
    (handle,) = save(manager, on_device(1))
    assert handle.saved.state is State.HOST
    reused = [torch.full((NUMBERS,), -1.0) for _ in range(4)]  # as the next layer would
    device.synchronize()
    right = torch.equal(manager.unpack(handle), content(1))
    del reused
    return right


def use_after_load(waits) -> bool:
    device.set_link(FAST, SLOW)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0))
    (handle,) = save(manager, on_device(1))
    return torch.equal(manager.unpack(handle), content(1))


def slab_after_copy(waits) -> bool:
    """The block of a tensor on its way back is handed to the next that leaves."""
    device.set_link(FAST, SLOW)
    accelerator = RunAhead()
    manager = new_manager(accelerator, skip_waits=waits, host_bytes=4 * NUMBERS)  # room for one
    manager.begin_step(plan_of(0))
    (first,) = save(manager, on_device(1))
    device.synchronize()
    accelerator.ahead = True
    back = manager.unpack(first)  # the copy back is queued, and read only later
    with manager.forward(1):  # not in the plan
        second = manager._pack(on_device(2))
    manager._mover.offload(second.saved)
    assert second.saved.block is not None
    accelerator.catch_up()
    device.synchronize()
    return torch.equal(back, content(1))


def death_while_leaving(waits) -> bool:
    device.set_link(SLOW, FAST)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0, release=NEVER))
    with manager.forward(0):
        handle = manager._pack(on_device(1))
        assert handle.saved.state is State.LEAVING
        del handle
        manager.drain()
    device.synchronize()
    return True


def death_after_staying(waits) -> bool:
    """Read before it was released: the copy out is void, and still reads."""
    device.set_link(SLOW, FAST)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0, release=NEVER))
    with manager.forward(0):
        handle = manager._pack(on_device(1))
        right = torch.equal(manager.unpack(handle), content(1))
        assert handle.saved.state is State.DEVICE
        del handle
        manager.drain()
    device.synchronize()
    return right


def death_while_returning(waits) -> bool:
    device.set_link(FAST, SLOW)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0))
    (handle,) = save(manager, on_device(1))
    manager._prefetch(handle.saved)
    assert handle.saved.state is State.RETURNING
    del handle
    manager.drain()
    reused = [torch.full((NUMBERS,), -1.0) for _ in range(4)]
    device.synchronize()
    return all(bool((tensor == -1.0).all()) for tensor in reused)


def eviction_while_returning(waits) -> bool:
    device.set_link(FAST, SLOW)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0))
    (handle,) = save(manager, on_device(1))
    manager._prefetch(handle.saved)
    assert manager.evict(1) == 4 * NUMBERS and handle.saved.state is State.HOST
    device.synchronize()
    return torch.equal(manager.unpack(handle), content(1))


def eviction_of_the_dead(waits) -> bool:
    """Pressure wants the memory of a dead tensor that a copy still uses."""
    device.set_link(SLOW, FAST)
    manager = new_manager(SimAccelerator(), skip_waits=waits)
    manager.begin_step(plan_of(0, release=NEVER))
    with manager.forward(0):
        manager._pack(on_device(1))
        manager.drain()
        assert manager.evict(1) == 4 * NUMBERS or waits
    device.synchronize()
    return True


RACES = {
    Wait.RELEASE_AFTER_OFFLOAD: [release_after_offload],
    Wait.USE_AFTER_LOAD: [use_after_load],
    Wait.SLAB_AFTER_COPY: [slab_after_copy],
    Wait.FREE_AFTER_COPY: [
        death_while_leaving,
        death_after_staying,
        death_while_returning,
        eviction_while_returning,
        eviction_of_the_dead,
    ],
}
EACH = [pytest.param(wait, race, id=f"{wait.name}-{race.__name__}") for wait, races in RACES.items() for race in races]


def spoiled(race, waits: frozenset[Wait]) -> bool:
    """Wrong bytes, or memory freed that a copy still needed."""
    before = device.stats()
    right = race(waits)
    after = device.stats()
    return not right or any(after[name] > before[name] for name in ("freed_under_copy", "late_writes"))


@pytest.mark.parametrize("wait", Wait)
def test_every_wait_has_a_race_that_it_wins(wait):
    assert (wait in RACES) != (wait in NOT_SHOWN)


def test_what_the_simulated_device_cannot_show_is_two_waits():
    assert {Wait.OFFLOAD_AFTER_COMPUTE, Wait.LOAD_AFTER_COMPUTE} == NOT_SHOWN == set(Wait) - set(RACES)


@pytest.mark.parametrize(("wait", "race"), EACH)
def test_with_all_waits_every_race_is_won(sim, wait, race):
    assert not spoiled(race, frozenset())


@pytest.mark.parametrize(("wait", "race"), EACH)
def test_without_the_wait_the_race_is_lost(sim, wait, race):
    assert spoiled(race, frozenset({wait}))


@pytest.mark.parametrize("wait", sorted(NOT_SHOWN, key=lambda wait: wait.name))
def test_the_other_waits_are_asked_for_all_the_same(sim, wait):
    """By the calls: the copy stream waits for an event of the compute stream, and not if the wait is skipped."""
    calls = []

    class Listening(SimAccelerator):
        def record(self, stream):
            event = super().record(stream)
            if stream == COMPUTE:
                compute_events.append(event)
            return event

        def wait(self, stream, event):
            if stream != COMPUTE and any(event is other for other in compute_events):
                calls.append(stream)
            super().wait(stream, event)

    compute_events: list = []

    def waits(skip) -> list:
        calls.clear()
        manager = new_manager(Listening(), skip_waits=skip)
        manager.begin_step(plan_of(0))
        (handle,) = save(manager, on_device(1))
        manager.unpack(handle)
        return list(calls)

    every = waits(frozenset())
    assert len(every) == 2 and every[0] != every[1]  # one per direction
    assert len(waits(frozenset({wait}))) == 1
