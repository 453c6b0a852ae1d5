"""Cases 7, 8 and 10 on a real GPU: copies and compute that are made late never change a bit, and each wait is needed.

``torch.cuda._sleep`` holds up a stream: before copies, so that whoever does not wait for them is early, and on the
compute stream, so that copies which do not wait for it are.
"""
from __future__ import annotations

import random

import pytest
import torch
from cuda_device import needs_gpu, needs_kernels
from simulated import close_pools, new_pool

from mindspeed_swap.core.accelerator import cuda
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, Key, Position, StepTrace
from mindspeed_swap.core.waits import Wait
from mindspeed_swap.units import GIB, MIB

pytestmark = [needs_gpu, needs_kernels]

RUNS = 50
NUMBERS = 4 << 20  # 16 MiB of fp32: a copy takes 0.3 ms
SLEEP = 4_000_000  # cycles, about 2 ms
END = Position(FORWARD, 0, 0, OUTSIDE, EXIT)
NEVER = Position("O", 0, 0, 7, 7)


class Held(cuda.CudaAccelerator):
    """Copies out and back start late, by these many cycles."""

    before_out = before_back = 0

    def copy(self, dst, src, stream):
        cycles = self.before_back if dst.is_cuda else self.before_out
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        super().copy(dst, src, stream)


@pytest.fixture(scope="module")
def held():
    accelerator = Held()
    yield accelerator
    accelerator.close()


@pytest.fixture(autouse=True)
def _clean(held):
    yield
    held.before_out = held.before_back = 0
    torch.cuda.synchronize()
    close_pools()
    torch.cuda.empty_cache()


# ---- one tensor, one wait
def manager_of(held, waits, host_bytes=GIB):
    pool = new_pool(held, host_bytes)
    pool.free(pool.alloc(4 * NUMBERS))  # page-locking waits for the device: not in the race
    manager = SwapManager(held, pool, min_bytes=1024, skip_waits=waits)
    manager.begin_step(Plan("test", 0, (Swap(Key(0, 0, OUTSIDE, 0), 4 * NUMBERS, END, NEVER),)))
    return manager


def values(seed: int) -> torch.Tensor:
    """Takes no other memory meanwhile."""
    start = seed * NUMBERS
    return torch.arange(start, start + NUMBERS, out=torch.empty(NUMBERS, device="cuda"))


def save(manager, tensor):
    """Released at the end of forward, once the caller has given its reference up."""
    with manager.forward(0):
        return manager._pack(tensor)


def overwrite(count: int = 4) -> list[torch.Tensor]:
    """Takes memory that was given up, as the next layer would."""
    return [torch.full((NUMBERS,), -1.0, device="cuda") for _ in range(count)]


def right(manager, handle, seed: int) -> bool:
    found = manager.unpack(handle).clone()
    torch.cuda.synchronize()
    return torch.equal(found, values(seed))


def out_before_it_is_written(held, waits):
    manager = manager_of(held, waits)
    torch.cuda._sleep(SLEEP)
    handle = save(manager, values(1))
    torch.cuda.synchronize()
    return right(manager, handle, 1)


def given_up_before_it_is_out(held, waits):
    manager = manager_of(held, waits)
    held.before_out = SLEEP
    handle = save(manager, values(1))
    assert handle.saved.state is State.HOST
    reused = overwrite()
    answer = right(manager, handle, 1)
    del reused
    return answer


def back_into_memory_still_in_use(held, waits):
    """The kernel that reads the recycled memory has not run when the copy back is queued."""
    manager = manager_of(held, waits)
    handle = save(manager, values(1))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = values(2)
    torch.cuda._sleep(SLEEP)
    kept = before * 1.0
    del before  # its memory is the buffer that comes back
    manager._prefetch(handle.saved)
    torch.cuda.synchronize()
    return torch.equal(kept, values(2)) and right(manager, handle, 1)


def read_before_it_is_back(held, waits):
    manager = manager_of(held, waits)
    handle = save(manager, values(1))
    overwrite()  # else the memory that comes back would hold the right bytes still
    torch.cuda.synchronize()
    held.before_back = SLEEP
    return right(manager, handle, 1)


def host_memory_taken_before_it_is_read(held, waits):
    """The first is read on another compute stream: that of the second has waited for nothing."""
    manager = manager_of(held, waits, host_bytes=4 * NUMBERS)  # room for one
    first = save(manager, values(1))
    second = values(2)
    torch.cuda.synchronize()
    held.before_back = SLEEP
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        back = manager.unpack(first)
    with manager.forward(1):
        handle = manager._pack(second)
    manager._mover.offload(handle.saved)
    assert handle.saved.block is not None
    torch.cuda.synchronize()
    return torch.equal(back, values(1))


def dies_on_its_way_back(held, waits):
    manager = manager_of(held, waits)
    handle = save(manager, values(1))
    torch.cuda.synchronize()
    held.before_back = SLEEP
    manager._prefetch(handle.saved)
    assert handle.saved.state is State.RETURNING
    del handle
    manager.drain()
    reused = overwrite()
    torch.cuda.synchronize()
    return all(bool((tensor == -1.0).all()) for tensor in reused)


RACES = {
    Wait.OFFLOAD_AFTER_COMPUTE: out_before_it_is_written,
    Wait.RELEASE_AFTER_OFFLOAD: given_up_before_it_is_out,
    Wait.LOAD_AFTER_COMPUTE: back_into_memory_still_in_use,
    Wait.USE_AFTER_LOAD: read_before_it_is_back,
    Wait.SLAB_AFTER_COPY: host_memory_taken_before_it_is_read,
    Wait.FREE_AFTER_COPY: dies_on_its_way_back,
}


def once(held, race, waits) -> bool:
    held.before_out = held.before_back = 0
    overwrite(8)  # nothing right is left by the run before
    torch.cuda.synchronize()
    answer = race(held, waits)
    torch.cuda.synchronize()
    close_pools()
    return answer


@pytest.mark.parametrize("wait", Wait, ids=lambda wait: wait.name)
def test_with_every_wait_it_is_right(held, wait):
    assert all(once(held, RACES[wait], frozenset()) for _ in range(RUNS))


@pytest.mark.parametrize("wait", Wait, ids=lambda wait: wait.name)
def test_without_the_wait_it_is_wrong(held, wait):
    assert any(not once(held, RACES[wait], frozenset({wait})) for _ in range(RUNS))


# ---- a model
class Model:
    """Layers of a product and a nonlinearity; 16 MiB are saved four times in each."""

    def __init__(self, layers: int = 6, width: int = 2048, tokens: int = 4096) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        like = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.weights = [
            torch.nn.Parameter(torch.randn(width, width, **like) / width**0.5) for _ in range(2 * layers)
        ]
        self.start = torch.randn(tokens, width, **like)

    def step(self, manager=None, plan=None, trace=None, hold_up=lambda: None):
        for weight in self.weights:
            weight.grad = None
        if manager is not None:
            manager.begin_step(plan, trace=trace)
            with manager.forward(0):
                loss = self._forward(manager.layer, hold_up)
        else:
            loss = self._forward(None, hold_up)
        hold_up()
        loss.backward()
        recorded = manager.end_step()[1] if manager is not None else None
        torch.cuda.synchronize()
        return [loss.detach(), *(weight.grad for weight in self.weights)], recorded

    def _forward(self, layer, hold_up):
        value = self.start
        for number in range(len(self.weights) // 2):
            first, second = self.weights[2 * number : 2 * number + 2]
            if layer is None:
                value = self._layer(value, first, second)
            else:
                hold_up()
                with layer(number + 1):
                    value = self._layer(value, first, second)
        return value.float().square().mean()

    @staticmethod
    def _layer(value, first, second):
        return value + torch.nn.functional.gelu(value @ first) @ second


def all_swapped(trace: StepTrace) -> Plan:
    swaps = []
    for record in trace.saved:
        if record.movable and record.sole is not None and record.first_read is not None:
            out, back = max(record.sole, record.last_use), record.first_read - 2
            if out < back:
                swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    return Plan(trace.model, 0, tuple(swaps))


def test_held_up_anywhere_a_step_ends_with_the_same_bits(held):
    model = Model()
    plain, _ = model.step()
    again, _ = model.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), "plain itself is not deterministic"
    manager = SwapManager(held, new_pool(held, GIB), min_bytes=MIB)
    memory = held.memory()
    _, trace = model.step(manager, trace=StepTrace("model", memory.capacity_bytes, memory.allocated_bytes, 1e6, 1e6))
    plan = all_swapped(trace)
    assert plan.swap_bytes > 200 * MIB
    chance = random.Random(0)
    for run in range(RUNS):
        held.before_out, held.before_back = (chance.choice((0, SLEEP // 8, SLEEP)) for _ in range(2))
        swapped, _ = model.step(
            manager, plan, hold_up=lambda: torch.cuda._sleep(SLEEP) if chance.random() < 0.3 else None
        )
        assert manager.stats.offloaded_bytes == plan.swap_bytes == manager.stats.loaded_bytes
        assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True)), f"run {run}"
