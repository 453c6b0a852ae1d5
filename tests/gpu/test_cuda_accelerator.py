"""The accelerator contract on CUDA: whose memory, how much of it, in which order, and that bytes arrive."""
from __future__ import annotations

import mmap
import random
import time

import pytest
import torch
from cuda_device import CAPACITY, FAKE, HOOK_OFF, UNIT, marked, needs_gpu, needs_kernels, small_device

from mindspeed_swap.core.accelerator import cuda
from mindspeed_swap.core.accelerator.torch_device import CAPACITY as CAPACITY_VARIABLE
from mindspeed_swap.core.accelerator.watch import OOM_HOOK, StatisticsOnly
from mindspeed_swap.core.link import probe_link, warn_if_slow
from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import MIB

pytestmark = needs_gpu

DELAY_CYCLES = 50_000_000  # about 30 ms: longer than every copy here
DELAYED_RUNS = 20


@pytest.fixture
def accelerator():
    with small_device() as device:
        yield device


class HostPool:
    """As much of a host pool as a test needs: one mapping per block."""

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def alloc(self, nbytes):
        block = type("Block", (), {"pending": ()})()
        block.tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self._accelerator.register_host(block.tensor.data_ptr(), nbytes)
        return block

    def free(self, block):
        self._accelerator.unregister_host(block.tensor.data_ptr())


@pytest.fixture
def host(accelerator):
    pool, blocks = HostPool(accelerator), []

    def make(nbytes):
        blocks.append(pool.alloc(nbytes))
        return blocks[-1].tensor

    yield make
    accelerator.synchronize()
    for block in blocks:
        pool.free(block)


# ---- whose memory
def test_owns(accelerator):
    mine = accelerator.empty(1024)
    assert accelerator.owns(mine) and accelerator.owns(mine[5:].view(-1))
    assert accelerator.owns(torch.empty(3, 4, dtype=torch.bfloat16, device="cuda").t())
    foreign = torch.from_dlpack(torch.utils.dlpack.to_dlpack(mine))
    assert foreign.data_ptr() == mine.data_ptr() and not accelerator.owns(foreign)
    assert not accelerator.owns(torch.empty(8))
    assert not accelerator.owns(torch.empty(8, device="meta"))


@needs_kernels
def test_owns_refuses_sparse(accelerator):
    assert not accelerator.owns(torch.eye(4, device="cuda").to_sparse())


def test_empty_is_an_ordinary_flat_tensor(accelerator):
    with torch.inference_mode():
        tensor = accelerator.empty(1000)
    assert not tensor.is_inference()
    assert tensor.dtype == torch.uint8 and tensor.shape == (1000,) and tensor.device.type == "cuda"


# ---- how much
def test_memory_equals_torchs_figures(accelerator):
    kept = [accelerator.empty(n) for n in (1, 513, UNIT + 1)]
    memory = accelerator.memory()
    assert memory.allocated_bytes == torch.cuda.memory_allocated() >= UNIT
    assert memory.reserved_bytes == torch.cuda.memory_reserved()
    assert abs(memory.capacity_bytes - CAPACITY) <= 1
    del kept


def test_capacity_is_enforced(accelerator):
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.empty(CAPACITY + 2 * MIB)
    torch.cuda.set_per_process_memory_fraction(0.01)  # a fraction that the user sets later counts
    assert accelerator.memory().capacity_bytes < CAPACITY or FAKE


@pytest.mark.skipif(not HOOK_OFF, reason="with the hook it is refused, see test_oom_guard.py")
def test_without_the_hook_room_is_not_counted_and_never_refused(monkeypatch):
    with small_device(torch.cuda.mem_get_info()[1]) as device:
        usable = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        device.leave_room(UNIT)
        assert device.memory().capacity_bytes == usable - UNIT and not device.take_room()
        assert len(device.empty(usable - UNIT // 2)) == usable - UNIT // 2
        device.leave_room(0)
        assert device.memory().capacity_bytes == usable


@pytest.mark.parametrize("text", ["2048TiB", "-1", "many"])
def test_impossible_capacity_is_an_error(text, monkeypatch):
    monkeypatch.setenv(CAPACITY_VARIABLE, text)
    with pytest.raises(SettingError, match=CAPACITY_VARIABLE):
        cuda.CudaAccelerator()


def test_hook_setting(monkeypatch, capsys):
    with small_device():
        pass
    capsys.readouterr()
    monkeypatch.setenv(OOM_HOOK, "0")
    with small_device() as accelerator:
        assert "MINDSPEED_SWAP_OOM_HOOK=0" in capsys.readouterr().out
        asked = []
        assert not accelerator.on_pressure(lambda nbytes, attempt: asked.append(nbytes) or True)
        assert not accelerator._watch.installed()
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.empty(2 * CAPACITY)
        assert asked == []
    monkeypatch.setenv(OOM_HOOK, "yes")
    with pytest.raises(SettingError, match=OOM_HOOK):
        cuda.CudaAccelerator()


@pytest.mark.parametrize("hook", ["1", "0"])
def test_interval_peaks(hook, monkeypatch):
    """Against a count of its own after each allocation. Without the hook the allocator's rounding is an estimate."""
    monkeypatch.setenv(OOM_HOOK, hook)
    random.seed(3)
    with small_device() as accelerator:
        torch.cuda.reset_peak_memory_stats()
        kept, overall = [], 0
        accelerator.take_interval()
        for _ in range(60):
            peak, largest = torch.cuda.memory_allocated(), 0
            for _ in range(random.randrange(6)):
                if kept and random.random() < 0.5:
                    kept.pop(random.randrange(len(kept)))
                    continue
                largest = max(largest, nbytes := random.choice([700, 3000, UNIT // 16, UNIT // 2 + 1]))
                if torch.cuda.memory_allocated() + nbytes > CAPACITY * 3 // 4:
                    kept.clear()
                kept.append(accelerator.empty(nbytes))
                peak = max(peak, torch.cuda.memory_allocated())
            overall = max(overall, peak)
            interval = accelerator.take_interval()
            assert interval.largest_request_bytes == largest
            if hook == "1" and not HOOK_OFF:
                assert interval.peak_bytes == peak
            else:
                assert abs(interval.peak_bytes - peak) <= 2 * MIB
        assert torch.cuda.max_memory_allocated() == overall  # the user's figure was left alone


def test_interval_survives_the_users_reset(accelerator):
    before = torch.cuda.memory_allocated()  # of other tests: what cuBLAS works in stays
    first = accelerator.empty(3 * UNIT)
    del first
    accelerator.take_interval()
    torch.cuda.reset_peak_memory_stats()
    second = accelerator.empty(UNIT)
    del second
    assert UNIT <= accelerator.take_interval().peak_bytes - before < UNIT + 2 * MIB
    assert accelerator.take_interval().peak_bytes == before


def test_without_the_extension_peaks_are_lower_bounds(accelerator):
    watch, before = StatisticsOnly(torch.cuda, torch.cuda.current_device()), torch.cuda.memory_allocated()
    first = accelerator.empty(2 * UNIT)
    assert watch.take_interval()[0] == torch.cuda.memory_allocated()
    del first
    peak, rise = watch.take_interval()
    assert peak == before + 2 * UNIT and rise == 2 * UNIT
    second = accelerator.empty(UNIT)
    del second
    assert watch.take_interval()[0] == torch.cuda.memory_allocated()


# ---- order and bytes
def test_round_trip_on_copy_streams(accelerator, host):
    out, back = accelerator.new_stream(), accelerator.new_stream()
    assert len({stream.cuda_stream for stream in (out, back, accelerator.compute_stream())}) == 3
    source, memory, target = marked(UNIT, 77), host(UNIT), accelerator.empty(UNIT)
    accelerator.wait(out, accelerator.record(accelerator.compute_stream()))
    start = accelerator.record(out)
    accelerator.copy(memory, source, out)
    end = accelerator.record(out)
    accelerator.wait(back, end)
    accelerator.copy(target, memory, back)
    accelerator.wait(accelerator.compute_stream(), accelerator.record(back))
    accelerator.synchronize(end)
    assert accelerator.done(end) and accelerator.elapsed_ms(start, end) >= 0
    assert torch.equal(target.cpu(), source.cpu())


def test_compute_stream_is_the_live_one(accelerator):
    """Case 8: users change streams; a stream remembered at the start would order nothing."""
    outside = accelerator.compute_stream()
    assert outside == torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert accelerator.compute_stream() == side != outside
        accelerator.copy(accelerator.empty(64), torch.zeros(64, dtype=torch.uint8), accelerator.new_stream())
        assert accelerator.compute_stream() == side  # copying put back what it changed
    assert accelerator.compute_stream() == outside
    with pytest.raises(RuntimeError):
        accelerator.copy(accelerator.empty(64), torch.zeros(63, dtype=torch.uint8), side)
    assert accelerator.compute_stream() == outside


def test_reserved_memory_stays_flat(accelerator, host):
    """Case 11: persistent streams, buffers made on the compute stream: no pool grows."""
    out, back, memory, reserved = accelerator.new_stream(), accelerator.new_stream(), host(UNIT), []
    for step in range(100):
        tensor = marked(UNIT, step)
        accelerator.wait(out, accelerator.record(accelerator.compute_stream()))
        accelerator.copy(memory, tensor, out)
        left = accelerator.record(out)
        accelerator.wait(accelerator.compute_stream(), left)
        del tensor
        tensor = accelerator.empty(UNIT)
        accelerator.wait(back, accelerator.record(accelerator.compute_stream()))
        accelerator.wait(back, left)
        accelerator.copy(tensor, memory, back)
        accelerator.wait(accelerator.compute_stream(), accelerator.record(back))
        accelerator.synchronize()
        reserved.append(accelerator.memory().reserved_bytes)
        del tensor
    assert len(set(reserved[3:])) == 1


def test_refused_registration_names_what_failed(accelerator):
    with pytest.raises(RuntimeError, match="cudaHostRegister of .* failed: .*CUDA error"):
        accelerator.register_host(0, 0)
    if not FAKE:
        torch.zeros(8, device="cuda").add_(1)  # the error is not left behind for the next kernel
        with pytest.raises(RuntimeError, match="cudaHostUnregister"):
            accelerator.unregister_host(torch.zeros(4096).data_ptr())
        torch.zeros(8, device="cuda").add_(1)
        torch.cuda.synchronize()


@needs_kernels
def test_occupied_for_about_as_long_as_asked(accelerator):
    stream = accelerator.compute_stream()
    accelerator.occupy(0.0)
    before = accelerator.record(stream)
    accelerator.occupy(40.0)
    after = accelerator.record(stream)
    assert not accelerator.done(after), "the host goes on"
    accelerator.synchronize(after)
    assert 10.0 < accelerator.elapsed_ms(before, after) < 160.0


@needs_kernels
def test_copies_do_not_block_the_host(accelerator, host):
    stream, memory = accelerator.new_stream(), host(64 * MIB)
    source = accelerator.empty(64 * MIB)
    accelerator.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    accelerator.wait(stream, accelerator.record(accelerator.compute_stream()))
    accelerator.copy(memory, source, stream)
    event = accelerator.record(stream)
    assert not accelerator.done(event)
    accelerator.synchronize(event)


@needs_kernels
@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_waits_for_compute(accelerator, host, wait):
    """With the wait every run is right; without it at least one is wrong, or this test could not fail."""
    stream, memory = accelerator.new_stream(), host(MIB)
    right = 0
    for run in range(DELAYED_RUNS):
        tensor = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        accelerator.synchronize()
        torch.cuda._sleep(random.randrange(DELAY_CYCLES // 10, DELAY_CYCLES))
        tensor.fill_(run + 1)
        if wait:
            accelerator.wait(stream, accelerator.record(accelerator.compute_stream()))
        accelerator.copy(memory, tensor, stream)
        accelerator.synchronize(accelerator.record(stream))
        right += int(bool((memory == run + 1).all()))
        accelerator.synchronize()
    assert right == DELAYED_RUNS if wait else right < DELAYED_RUNS


@needs_kernels
@pytest.mark.parametrize("wait", [True, False])
def test_memory_is_released_only_after_its_copy(accelerator, host, wait):
    """Case 10: released, allocated again and overwritten while a late copy still has to read it."""
    stream, memory = accelerator.new_stream(), host(8 * MIB)
    right = 0
    for run in range(DELAYED_RUNS):
        tensor = torch.full((8 * MIB,), run + 1, dtype=torch.uint8, device="cuda")
        accelerator.wait(stream, accelerator.record(accelerator.compute_stream()))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES // 4)
        accelerator.copy(memory, tensor, stream)
        if wait:
            accelerator.wait(accelerator.compute_stream(), accelerator.record(stream))
        del tensor
        torch.full((8 * MIB,), 255, dtype=torch.uint8, device="cuda")
        accelerator.synchronize()
        right += int(bool((memory == run + 1).all()))
    assert right == DELAYED_RUNS if wait else right < DELAYED_RUNS


# ---- the link
def test_link(accelerator, capsys):
    start = time.monotonic()
    link = probe_link(accelerator, HostPool(accelerator))
    took = time.monotonic() - start
    limit = accelerator.link_limit_bytes_per_ms()
    with capsys.disabled():
        print(f"\nlink: {link}; limit by NVML {limit and limit / 1e6} GB/s; probed in {took:.2f} s")
    assert link is not None
    warn_if_slow(link, limit)
    if not FAKE:
        assert 1e6 < link.d2h_bytes_per_ms < 1e9 and 1e6 < link.h2d_bytes_per_ms < 1e9
        assert link.d2h_both_bytes_per_ms <= 1.1 * link.d2h_bytes_per_ms
