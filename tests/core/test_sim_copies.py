"""The copy engines of the simulated device, misuse that must show, and processes that fork, end or are interrupted."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_swap.core.accelerator.base import Stream
from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.sim import device
from mindspeed_swap.units import MIB

ROOT = Path(__file__).resolve().parents[2]


def copy_workers() -> int:
    return sum(task.read_text() == "sim-copy\n" for task in Path("/proc/self/task").glob("*/comm"))


@pytest.fixture
def host(sim: SimAccelerator) -> Iterator[Callable[[int], torch.Tensor]]:
    """Makes flat uint8 tensors over registered host memory."""
    registered: dict[int, np.ndarray] = {}

    def make(nbytes: int) -> torch.Tensor:
        array = np.zeros(nbytes, dtype=np.uint8)
        registered[array.ctypes.data] = array
        sim.register_host(array.ctypes.data, nbytes)
        return torch.from_numpy(array)

    yield make
    sim.close()  # unregisters


def test_round_trip_keeps_bytes_and_order(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    out, into = sim.new_stream(), sim.new_stream()
    source = torch.randint(0, 255, (5 * MIB + 3,), dtype=torch.uint8)
    slab, back = host(source.numel()), sim.empty(source.numel())
    device.set_link(0.05, 0)  # a stream that does not wait for the slow one reads too early
    sim.wait(out, sim.record(sim.compute_stream()))
    sim.copy(slab, source, out)
    left = sim.record(out)
    sim.wait(into, left)
    sim.copy(back, slab, into)
    arrived = sim.record(into)
    sim.wait(sim.compute_stream(), arrived)
    assert sim.done(left) and sim.done(arrived)
    assert torch.equal(back, source) and torch.equal(slab, source)
    assert sim.elapsed_ms(left, arrived) > 0
    sim.copy(slab[:10], torch.ones(10, dtype=torch.uint8), sim.compute_stream())
    assert slab[:10].tolist() == [1] * 10, "the compute stream copies at once"
    sim.synchronize()
    assert device.stats()["pending_copies"] == 0


def test_copy_is_strict_about_its_operands(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    stream = sim.new_stream()
    ours, slab = sim.empty(100), host(100)
    with device.host_memory():
        unregistered = torch.empty(100, dtype=torch.uint8)
    wrong = ((ours, sim.empty(100)), (slab, slab), (ours, unregistered), (ours, slab[:50]), (ours.float(), slab))
    for dst, src in wrong:
        with pytest.raises(ValueError, match="copy:"):
            sim.copy(dst, src, stream)
    sim.copy(ours[10:20], slab[90:], stream)
    sim.synchronize()
    with pytest.raises(ValueError, match="already"):
        sim.register_host(slab.data_ptr() + 50, 10)
    with pytest.raises(ValueError, match="not registered"):
        sim.unregister_host(slab.data_ptr() + 50)
    assert device.stats()["registered_bytes"] == 100
    sim.unregister_host(slab.data_ptr())
    assert device.stats()["registered_bytes"] == 0


def best_of_three(measure: Callable[[], float]) -> float:
    """The least of three: what else runs on the machine only ever makes things slower."""
    return min(measure() for _ in range(3))


def test_a_slow_link_is_slow_and_full_duplex(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    size = 2 * MIB
    device.set_link(0.02, 0.02)
    expected = size / 0.02e9 * 1e3  # 105 ms
    streams: list[Stream] = [sim.new_stream(), sim.new_stream()]
    leaving = [(host(size), sim.empty(size)), (host(size), sim.empty(size))]
    arriving = (sim.empty(size), host(size))

    def milliseconds(*copies: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Of copies that start together, one per stream: until the last has ended."""
        start = sim.record(sim.compute_stream())
        for (dst, src), stream in zip(copies, streams, strict=False):
            sim.copy(dst, src, stream)
        ends = [sim.record(stream) for stream in streams]
        sim.synchronize()
        return max(sim.elapsed_ms(start, end) for end in ends)

    assert expected * 0.99 < best_of_three(lambda: milliseconds(leaving[0])) < expected * 1.5
    assert expected * 0.99 < best_of_three(lambda: milliseconds(leaving[0], arriving)) < expected * 1.5, "full duplex"
    assert milliseconds(*leaving) > expected * 1.98, "the streams of one direction share its link"


def test_queueing_does_not_wait_for_the_link(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    device.set_link(0.002, 0.002)
    stream = sim.new_stream()
    slab, source = host(4 * MIB), sim.empty(4 * MIB)
    sim.copy(slab, source, stream)
    assert not sim.done(sim.record(stream)), "two seconds of copying cannot be over"


def test_reading_without_waiting_shows(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    slab = host(4 * MIB)
    slab.view(torch.float32).fill_(1.0)
    buffer = sim.empty(4 * MIB)
    buffer.copy_(slab)  # right already: a missing wait could go unnoticed
    device.set_link(0.02, 0.02)
    into = sim.new_stream()
    sim.copy(buffer, slab, into)
    assert bool(buffer.view(torch.float32)[MIB // 2:].sum().isnan())
    sim.wait(sim.compute_stream(), sim.record(into))
    assert bool((buffer.view(torch.float32) == 1).all())


def test_a_copy_still_to_be_read_is_not_spoiled_by_the_next_one(
    sim: SimAccelerator, host: Callable[[int], torch.Tensor],
) -> None:
    slab, first, second = host(2 * MIB), sim.empty(2 * MIB), torch.full((2 * MIB,), 9, dtype=torch.uint8)
    slab.fill_(5)
    device.set_link(0.05, 0.05)
    stream = sim.new_stream()
    sim.copy(first, slab, stream)   # reads the slab that the second copy, queued behind, overwrites
    sim.copy(slab, second, stream)
    sim.synchronize()
    assert bool((first == 5).all()) and bool((slab == 9).all())


def test_freeing_the_source_of_a_copy_shows(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    before = device.stats()
    device.set_link(0.05, 0.05)
    out = sim.new_stream()
    slab = host(8 * MIB)
    source = torch.ones(2 * MIB)
    base = device.memory_allocated()
    sim.copy(slab, source.view(torch.uint8), out)
    del source
    assert device.memory_allocated() == base - 8 * MIB, "not counted from here on"
    assert device.stats()["quarantined_bytes"] == 8 * MIB
    sim.synchronize()
    after = device.stats()
    assert bool(slab.view(torch.bfloat16)[2 * MIB:].isnan().any())
    assert after["freed_under_copy"] - before["freed_under_copy"] == 1
    assert after["late_writes"] == before["late_writes"]
    assert after["quarantined_bytes"] == 0


def test_freeing_the_destination_is_a_late_write(sim: SimAccelerator, host: Callable[[int], torch.Tensor]) -> None:
    before = device.stats()
    device.set_link(0.05, 0.05)
    into = sim.new_stream()
    buffer, bystander = sim.empty(4 * MIB), sim.empty(4 * MIB)
    sim.copy(buffer, host(4 * MIB), into)
    del buffer, bystander
    assert device.stats()["quarantined_bytes"] == 4 * MIB, "what no copy needs is freed at once"
    fresh = torch.full((4 * MIB,), 3, dtype=torch.uint8)
    sim.synchronize()
    after = device.stats()
    assert bool((fresh == 3).all())
    assert after["freed_under_copy"] - before["freed_under_copy"] == 1
    assert after["late_writes"] - before["late_writes"] == 1


def test_unregistering_host_memory_under_a_copy_shows(sim: SimAccelerator) -> None:
    before = device.stats()["freed_under_copy"]
    device.set_link(0.05, 0.05)
    into = sim.new_stream()
    array = np.ones(6 * MIB, dtype=np.uint8)
    sim.register_host(array.ctypes.data, array.nbytes)
    buffer = sim.empty(4 * MIB)
    sim.copy(buffer, torch.from_numpy(array)[:4 * MIB], into)
    event = sim.record(into)
    sim.unregister_host(array.ctypes.data)
    assert sim.done(event), "the memory may be unmapped now"
    assert bool((buffer[-MIB:] == 0xFF).all()) and bool((array[4 * MIB:] == 1).all())
    assert device.stats()["freed_under_copy"] == before + 1


def test_close_stops_the_workers_and_drops_what_is_queued(
    sim: SimAccelerator, host: Callable[[int], torch.Tensor],
) -> None:
    device.set_link(1e-4, 1e-4)  # 100 kB/s
    streams = [sim.new_stream() for _ in range(3)]
    assert copy_workers() == 0, "workers start at the first copy"
    slab = host(4 * MIB)
    event = None
    for stream in streams:
        if event is not None:
            sim.wait(stream, event)
        sim.copy(sim.empty(4 * MIB), slab, stream)
        event = sim.record(stream)
    assert copy_workers() == 3 and not sim.done(event)
    start = time.monotonic()
    sim.close()
    sim.close()
    assert time.monotonic() - start < 20 and copy_workers() == 0
    assert sim.done(event) and device.stats()["quarantined_bytes"] == 0 and device.stats()["pending_copies"] == 0
    device.set_link(16, 16)
    slab = host(MIB)
    sim.copy(slab, torch.full((MIB,), 4, dtype=torch.uint8).clone(), streams[0])  # freed at once: only must not hang
    sim.synchronize()


# ---- processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_host_memory_and_no_copy_engine(
    sim: SimAccelerator, host: Callable[[int], torch.Tensor],
) -> None:
    device.set_link(0.01, 0.01)
    stream = sim.new_stream()
    source, slab = sim.empty(2 * MIB), host(2 * MIB)
    stop = threading.Event()

    def allocate() -> None:  # so that locks are held when fork happens
        while not stop.is_set():
            torch.empty(1000)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(5):
            sim.copy(slab, source, stream)
            pid = os.fork()
            if pid == 0:
                ok = False
                try:
                    device.extension().set_capacity(1)
                    fresh = torch.empty(MIB, dtype=torch.uint8)
                    ok = not sim.owns(fresh)
                    del source, fresh
                    refused = 0
                    for use in (sim.synchronize, lambda: sim.record(stream)):
                        try:
                            use()
                        except RuntimeError:
                            refused += 1
                    sim.close()
                    ok = ok and refused == 2
                finally:
                    os._exit(0 if ok else 1)
            deadline = time.monotonic() + 10
            while (status := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.005)
            if status == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            assert status == (pid, 0)
    finally:
        stop.set()
        thread.join()


EXIT_SCRIPT = """
    import os, sys, time, numpy as np, torch
    from mindspeed_swap.core.accelerator.sim import SimAccelerator
    from mindspeed_swap.sim import device
    sim = SimAccelerator()
    device.set_link(1e-5, 1e-5)  # a quarter of an hour for this copy: longer than any timeout here
    sim.on_pressure(lambda nbytes, attempt: True)
    array = np.zeros(8 << 20, dtype=np.uint8)
    sim.register_host(array.ctypes.data, array.nbytes)
    a = sim.empty(8 << 20)
    stream = sim.new_stream()
    sim.copy(a, torch.from_numpy(array), stream)
    print("ready", flush=True)
"""


def test_exit_with_copies_queued_and_tensors_alive() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(EXIT_SCRIPT + """
    class Late:
        def __del__(self):
            try:
                torch.empty(1 << 20)
            except torch.OutOfMemoryError:
                pass
    sys.keep = Late(), a  # dies in the last breath of the interpreter, when the handler must not be called
    device.set_capacity(1)
    """)], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_ctrl_c_ends_a_host_wait() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(EXIT_SCRIPT + "    sim.synchronize()\n")], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and process.returncode != 0, (process.returncode, errors)
