"""An allocation that fails is tried again after the handler made room; data, gradients and errors stay as they were."""
from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from cuda_device import (
    CAPACITY,
    UNIT,
    Evictor,
    holds,
    marked,
    needs_gpu,
    needs_hook,
    needs_kernels,
    small_device,
)

from mindspeed_swap.core.accelerator.torch_device import CAPACITY as CAPACITY_VARIABLE
from mindspeed_swap.core.accelerator.watch import REFUSED_BYTES
from mindspeed_swap.units import MIB

pytestmark = [needs_gpu, needs_hook]


@pytest.fixture
def accelerator():
    with small_device() as device:
        yield device


def _guard(accelerator):
    return accelerator._watch


def test_survives_with_data_intact(accelerator):
    evictor = Evictor()
    assert accelerator.on_pressure(evictor)
    for mark in range(20):  # 20 units on a device of 12
        evictor.kept.append(marked(UNIT, mark))
    late = [marked(UNIT * 3 // 4, 100 + i) for i in range(8)]
    assert len(evictor.on_host) >= 8
    assert all(holds(tensor, mark) for mark, tensor in enumerate(evictor.on_host + evictor.kept))
    assert all(holds(tensor, 100 + i) for i, tensor in enumerate(late))
    assert torch.cuda.memory_reserved() <= CAPACITY


ROOM = 64 * MIB


@pytest.fixture
def whole_device():
    with small_device(torch.cuda.mem_get_info()[1]) as device:
        yield device


def _usable():
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def test_room_is_left_for_others_until_nothing_can_be_evicted(whole_device):
    usable = _usable()
    whole_device.leave_room(2 * ROOM)
    whole_device.leave_room(ROOM)  # it was ours to change
    assert whole_device.memory().capacity_bytes <= usable - ROOM
    assert usable - ROOM - whole_device.memory().capacity_bytes <= 1
    most = torch.empty(usable - 2 * ROOM, dtype=torch.uint8, device="cuda")
    whole_device.on_pressure(lambda nbytes, attempt: False)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * ROOM // 2, dtype=torch.uint8, device="cuda")
    asked = []
    whole_device.on_pressure(lambda nbytes, attempt: asked.append(whole_device.take_room()) or asked[-1])
    kept = torch.empty(3 * ROOM // 2, dtype=torch.uint8, device="cuda")
    assert asked == [True] and len(kept) == 3 * ROOM // 2
    assert abs(whole_device.memory().capacity_bytes - usable) <= 1
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * ROOM, dtype=torch.uint8, device="cuda")
    assert asked == [True, False], "it is taken once"
    del most, kept


def test_later_only_what_others_have_is_not_counted(whole_device):
    usable = _usable()
    whole_device.leave_room(ROOM)
    whole_device.leave_room(0)
    assert whole_device.memory().capacity_bytes == usable and not whole_device.take_room()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_no_room_is_left_of_what_the_user_has_capped(accelerator):
    accelerator.leave_room(ROOM)
    assert abs(accelerator.memory().capacity_bytes - CAPACITY) <= 1 and not accelerator.take_room()


@pytest.mark.parametrize("then", ["take", "leave"])
def test_a_cap_that_the_user_sets_after_us_stays(whole_device, then):
    whole_device.leave_room(ROOM)
    torch.cuda.set_per_process_memory_fraction(0.5)
    if then == "take":
        assert not whole_device.take_room()
    else:
        whole_device.leave_room(0)
        total = torch.cuda.mem_get_info()[1]
        assert abs(whole_device.memory().capacity_bytes - total // 2) <= 1
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.5, abs=1e-6)


def test_the_cap_ends_with_us(whole_device):
    whole_device.leave_room(ROOM)
    assert torch.cuda.get_per_process_memory_fraction() < 1
    whole_device.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_handler_hears_size_and_attempt(accelerator):
    calls = []
    accelerator.on_pressure(lambda nbytes, attempt: calls.append((nbytes, attempt)) or attempt < 2)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2 * CAPACITY + 7, dtype=torch.uint8, device="cuda")
    assert calls == [(2 * CAPACITY + 7, 0), (2 * CAPACITY + 7, 1), (2 * CAPACITY + 7, 2)]


def test_hopeless_request_raises_after_bounded_tries(accelerator):
    calls = []
    accelerator.on_pressure(lambda nbytes, attempt: calls.append(attempt) or True)
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)
    assert calls == list(range(_guard(accelerator).MAX_ATTEMPTS))
    assert holds(marked(UNIT, 3), 3)


def test_raw_allocations_are_retried_too(accelerator):
    evictor = Evictor()
    accelerator.on_pressure(evictor)
    evictor.kept = [marked(UNIT, mark) for mark in range(11)]
    address = torch.cuda.caching_allocator_alloc(3 * UNIT)
    torch.cuda.caching_allocator_delete(address)
    assert evictor.calls[0] == (3 * UNIT, 0)


def test_handler_error_is_reported_and_not_retried(accelerator, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_value))
    calls = []

    def broken(nbytes, attempt):
        calls.append(attempt)
        raise ZeroDivisionError("in the handler")

    accelerator.on_pressure(broken)
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)
    assert calls == [0]
    assert [type(error) for error in seen] == [ZeroDivisionError]


def test_handler_is_not_reentered(accelerator):
    depth, deepest, inner = 0, 0, []

    def greedy(nbytes, attempt):
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        try:
            accelerator.empty(3 * CAPACITY)
        except torch.OutOfMemoryError as error:
            inner.append(error)
        depth -= 1
        return False

    accelerator.on_pressure(greedy)
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)
    assert deepest == 1 and len(inner) == 1


def test_handler_may_remove_itself(accelerator):
    def once(nbytes, attempt):
        accelerator.on_pressure(None)
        return True

    accelerator.on_pressure(once)
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)


def test_handler_sees_ordinary_tensors(accelerator):
    seen = []

    def look(nbytes, attempt):
        fresh = torch.empty(8)
        seen.append((torch.is_inference_mode_enabled(), fresh.is_inference(), torch.is_grad_enabled()))
        return False

    accelerator.on_pressure(look)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * CAPACITY, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)
    assert seen == [(False, False, False)] * 2
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_error_on_its_way_survives(accelerator):
    """A finaliser that allocates runs, and is rescued, while the exception that killed its owner is on its way."""
    evictor = Evictor()
    accelerator.on_pressure(evictor)
    evictor.kept = [marked(UNIT, mark) for mark in range(11)]

    class Allocates:
        def __del__(self):
            accelerator.empty(3 * UNIT)

    def fails():
        owner = Allocates()
        raise KeyError(len([owner]))

    with pytest.raises(KeyError):
        fails()
    gc.collect()
    assert evictor.calls


def test_threads_do_not_hang(accelerator):
    evictor = Evictor()
    lock = threading.Lock()  # the list is the test's; the guard calls handlers from several threads at once

    def handler(nbytes, attempt):
        with lock:
            return evictor(nbytes, attempt)

    accelerator.on_pressure(handler)
    end, rounds, errors = time.monotonic() + 4, [0] * 4, []

    def work(index):
        mine: list[torch.Tensor] = []
        try:
            while time.monotonic() < end:
                try:
                    mine.append(accelerator.empty((index + 1) * UNIT // 16 + index))
                    if index == 0:
                        fresh = accelerator.empty(UNIT // 4)
                        with lock:
                            evictor.kept.append(fresh)
                        del fresh
                except torch.OutOfMemoryError:
                    mine.clear()
                if len(mine) > 20:
                    mine.pop(0)
                rounds[index] += 1
                if rounds[index] % 100 == 0:
                    evictor.on_host.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not errors and all(rounds)


def test_close_restores_the_allocator(accelerator):
    evictor = Evictor()
    accelerator.on_pressure(evictor)
    guard = _guard(accelerator)
    assert guard.installed()
    alive = weakref.ref(evictor)
    accelerator.close()
    assert not guard.installed()
    before = guard.counters()
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(2 * CAPACITY)
    assert guard.counters() == before and evictor.calls == []
    del evictor
    gc.collect()
    assert alive() is None  # nothing keeps the handler, nor the tensors it holds
    assert not accelerator.on_pressure(lambda nbytes, attempt: True)


def test_self_test_keeps_the_handler_and_can_be_repeated(accelerator):
    evictor = Evictor()
    accelerator.on_pressure(evictor)
    for _ in range(3):
        _guard(accelerator).self_test(REFUSED_BYTES)
    assert evictor.calls == []
    evictor.kept = [marked(UNIT, mark) for mark in range(11)]
    accelerator.empty(3 * UNIT)
    assert evictor.calls


def test_failed_self_test_is_noticed(accelerator):
    with pytest.raises(RuntimeError, match="must be refused was not"):
        _guard(accelerator).self_test(UNIT)  # a size that is not refused
    assert holds(marked(UNIT, 5), 5)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("ending", ["return", "raise"])
def test_exit(ending, closed):
    """At exit a handler still holds device tensors and a finaliser still allocates, too much: no crash, no handler."""
    code = f"""
        import atexit, torch
        from mindspeed_swap.core.accelerator.cuda import CudaAccelerator
        accelerator = CudaAccelerator()
        asked = {{"kept": [accelerator.empty(1 << 20) for _ in range(4)]}}
        accelerator.on_pressure(asked.__setitem__)  # no function: its globals would keep the finaliser from running
        class Late:
            allocate, error, print, asked = accelerator.empty, torch.OutOfMemoryError, print, asked
            def __del__(self):
                try:
                    type(self).allocate({8 * CAPACITY})
                except self.error:
                    type(self).print("refused", list(self.asked), flush=True)
        keep = Late()
        if not {closed}:
            atexit.unregister(accelerator.close)
        if {ending!r} == "raise":
            raise SystemExit(7)
    """
    environment = os.environ | {CAPACITY_VARIABLE: str(CAPACITY)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (7 if ending == "raise" else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "refused ['kept']"


@needs_kernels
def test_backward_gives_equal_gradients(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(6)))
    batch = torch.randn(4096, 2048, device="cuda", requires_grad=True)

    def gradients(fill: bool, evictor: Evictor) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(batch).square().sum()
        evictor.kept = []
        while fill and not evictor.calls and torch.cuda.memory_allocated() < CAPACITY - 50 * MIB:
            evictor.kept.append(torch.full((16 * MIB,), 3, dtype=torch.uint8, device="cuda"))
        evicted = len(evictor.on_host)
        loss.backward()
        assert not fill or len(evictor.on_host) > evicted, "backward met no pressure: the test shows nothing"
        return [parameter.grad.cpu() for parameter in model.parameters()]

    plain = gradients(False, Evictor())
    evictor = Evictor()
    accelerator.on_pressure(evictor)
    squeezed = gradients(True, evictor)
    assert all(torch.equal(a, b) for a, b in zip(plain, squeezed, strict=True))
    assert all(bool((tensor == 3).all()) for tensor in evictor.on_host)


@needs_kernels
def test_handler_is_not_asked_while_a_graph_is_captured(accelerator):
    calls = []
    accelerator.on_pressure(lambda nbytes, attempt: calls.append(attempt) or False)
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(2 * CAPACITY, dtype=torch.uint8, device="cuda")
    assert calls == []


def test_cost_of_the_hook(accelerator, capsys):
    """Printed, and bounded loosely (other work on the machine counts as ours). 0.05 us were measured on an idle one."""
    guard = _guard(accelerator)

    def per_call() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            torch.empty(1024, dtype=torch.uint8, device="cuda")
        return (time.perf_counter() - start) / 2000 * 1e6

    hooked = plain = float("inf")
    for _ in range(10):  # in turns, so that both meet the same disturbances
        hooked = min(hooked, per_call())
        guard.uninstall()
        plain = min(plain, per_call())
        guard.install(torch.cuda.current_device())
    with capsys.disabled():
        print(f"\nallocate + free: {plain:.2f} us, with the hook {hooked:.2f} us")
    assert hooked - plain < 3.0


def test_intervals_in_threads_never_fall_short(accelerator):
    """With other threads allocating, the peak is still at least what this thread alone held."""
    random.seed(1)
    stop = threading.Event()

    def noise():
        while not stop.is_set():
            accelerator.empty(random.randrange(1, UNIT // 16))

    threads = [threading.Thread(target=noise, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            accelerator.take_interval()
            first, second = accelerator.empty(UNIT), accelerator.empty(2 * UNIT)
            del first, second
            assert accelerator.take_interval().peak_bytes >= 3 * UNIT
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
