"""Each wait of the manager is needed: with it the bytes are right, without it not.

Streams of the fake runtime are truly asynchronous, so that also the waits for compute can be shown. Copies and kernels
are slowed down: whoever does not wait loses for certain.
"""
from __future__ import annotations

import pytest
import torch
from npu_device import NUMBERS, SLOW, content, fake, manager_of, on_device

from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, Key, Position
from mindspeed_swap.core.waits import Wait

NBYTES = 4 * NUMBERS
KERNEL_MS = 1500.0  # of one kernel; the host must be quicker, however busy it is
END = Position(FORWARD, 0, 0, OUTSIDE, EXIT)
NEVER = Position("O", 0, 0, 7, 7)


def plan(release: Position = END) -> Plan:
    return Plan("test", 0, (Swap(Key(0, 0, OUTSIDE, 0), NBYTES, release, NEVER),))


def save(manager, tensors: list[torch.Tensor]):
    """Saved and, under the plan, released at the end of forward. The caller's reference is taken."""
    with manager.forward(0):
        return manager._pack(tensors.pop())


def is_content(tensor: torch.Tensor, seed: int) -> bool:
    return torch.equal(tensor.cpu(), content(seed))


def overwrite(count: int = 3) -> list[torch.Tensor]:
    """Takes the memory that has been given up, as the next layer would."""
    return [torch.empty(NUMBERS, device="npu").fill_(-1) for _ in range(count)]


def release_after_offload(manager) -> bool:
    tensors = [on_device(1)]
    manager.begin_step(plan())
    fake.fakecann_set_link(SLOW, 0)
    handle = save(manager, tensors)
    assert handle.saved.state is State.HOST
    reused = overwrite()
    right = is_content(manager.unpack(handle), 1)
    del reused
    return right


def offload_after_compute(manager) -> bool:
    source = on_device(1)
    manager.begin_step(plan())
    overwrite()  # what is there before the kernel runs
    torch.npu.synchronize()
    fake.fakecann_set_kernel_ms(KERNEL_MS)
    handle = save(manager, [source * 1.0])  # the kernel that writes it is still to run
    return is_content(manager.unpack(handle), 1)


def load_after_compute(manager) -> bool:
    tensors = [on_device(1)]
    manager.begin_step(plan())
    handle = save(manager, tensors)
    torch.npu.synchronize()
    fake.fakecann_set_kernel_ms(KERNEL_MS)
    overwrite(1)  # queued, and given up again: its memory is what the load gets
    return is_content(manager.unpack(handle), 1)


def use_after_load(manager) -> bool:
    tensors = [on_device(1)]
    manager.begin_step(plan())
    handle = save(manager, tensors)
    torch.npu.synchronize()
    overwrite()  # so that what is there before the copy is not what is wanted
    torch.npu.synchronize()
    fake.fakecann_set_link(0, SLOW)
    return is_content(manager.unpack(handle), 1)


def slab_after_copy(manager) -> bool:
    """The block of a tensor on its way back is handed to the next that leaves."""
    tensors, second = [on_device(1)], on_device(2)
    manager.begin_step(plan())
    first = save(manager, tensors)
    torch.npu.synchronize()
    fake.fakecann_set_link(0, SLOW)
    with torch.npu.stream(torch.npu.Stream()):  # what the other tensor waits for says nothing of this copy
        back = manager.unpack(first)
    with manager.forward(1):  # not in the plan
        other = manager._pack(second)
    manager._mover.offload(other.saved)
    assert other.saved.block is not None
    torch.npu.synchronize()
    return is_content(back, 1)


def death_while_returning(manager) -> bool:
    tensors = [on_device(1)]
    manager.begin_step(plan())
    handle = save(manager, tensors)
    torch.npu.synchronize()
    fake.fakecann_set_link(0, SLOW)
    manager._prefetch(handle.saved)
    del handle
    manager.drain()
    reused = overwrite()
    torch.npu.synchronize()
    return all(bool((tensor.cpu() == -1).all()) for tensor in reused)


def eviction_while_returning(manager) -> bool:
    tensors = [on_device(1)]
    manager.begin_step(plan())
    handle = save(manager, tensors)
    torch.npu.synchronize()
    fake.fakecann_set_link(0, SLOW)
    manager._prefetch(handle.saved)
    assert manager.evict(1) == NBYTES and handle.saved.state is State.HOST
    reused = overwrite()
    torch.npu.synchronize()
    return all(bool((tensor.cpu() == -1).all()) for tensor in reused)


RACES = [
    (Wait.RELEASE_AFTER_OFFLOAD, release_after_offload),
    (Wait.OFFLOAD_AFTER_COMPUTE, offload_after_compute),
    (Wait.LOAD_AFTER_COMPUTE, load_after_compute),
    (Wait.USE_AFTER_LOAD, use_after_load),
    (Wait.SLAB_AFTER_COPY, slab_after_copy),
    (Wait.FREE_AFTER_COPY, death_while_returning),
    (Wait.FREE_AFTER_COPY, eviction_while_returning),
]
HOST_BYTES = {slab_after_copy: NBYTES}  # room for one


def test_every_wait_has_a_race():
    assert {wait for wait, _ in RACES} == set(Wait)


@pytest.mark.parametrize("skipped", [False, True], ids=["with", "without"])
@pytest.mark.parametrize(("wait", "race"), RACES, ids=[f"{wait.name}-{race.__name__}" for wait, race in RACES])
def test_a_race_is_won_with_the_wait_and_lost_without(npu, wait, race, skipped):
    skip = frozenset({wait}) if skipped else frozenset()
    with manager_of(npu, skip, HOST_BYTES.get(race, 16 * NBYTES)) as manager:
        assert race(manager) is not skipped
        fake.fakecann_set_kernel_ms(0)
