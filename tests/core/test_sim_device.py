"""The memory of the simulated device: capacity, figures, pressure, and whose memory is whose."""
from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.errors import SettingError
from mindspeed_swap.sim import device
from mindspeed_swap.units import MIB

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=os.environ | {"PYTHONPATH": "."} | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )


def leave_free(nbytes: int) -> None:
    device.set_capacity(device.memory_allocated() + nbytes)


# ---- capacity and figures
def test_capacity_is_exact_and_raises_torch_oom(sim: SimAccelerator) -> None:
    leave_free(10 * MIB)
    held = torch.empty(10 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1, dtype=torch.uint8)
    assert "(1 bytes)" in str(caught.value)
    assert f"({device.capacity()} bytes)" in str(caught.value)
    assert f"({device.memory_allocated()} bytes) is in use" in str(caught.value)
    del held
    assert torch.empty(10 * MIB, dtype=torch.uint8).numel() == 10 * MIB


def test_oom_inside_an_operator_leaves_the_figures_right(sim: SimAccelerator) -> None:
    a = torch.ones(MIB)
    leave_free(3 * MIB)
    before = device.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        a + a
    with pytest.raises(torch.OutOfMemoryError):
        sim.empty(3 * MIB + 1)
    assert device.memory_allocated() == before


def test_interval_gives_peak_and_largest_request_since_the_last_call(sim: SimAccelerator) -> None:
    sim.take_interval()
    base = device.memory_allocated()
    a = sim.empty(5 * MIB)
    b = sim.empty(3 * MIB)
    del a
    first = sim.take_interval()
    assert (first.peak_bytes - base, first.largest_request_bytes) == (8 * MIB, 5 * MIB)
    second = sim.take_interval()
    assert (second.peak_bytes - base, second.largest_request_bytes) == (3 * MIB, 0)
    device.reset_peak()
    c = sim.empty(MIB)
    assert device.max_memory_allocated() - base == 4 * MIB
    assert sim.memory().allocated_bytes - base == 4 * MIB
    del b, c


def test_resize_and_share_memory_work(sim: SimAccelerator) -> None:
    a = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    base = device.memory_allocated()
    a.untyped_storage().resize_(0)
    assert device.memory_allocated() == base - 4 * MIB
    assert sim.owns(a)  # no bytes: nothing that would have to be moved
    a.untyped_storage().resize_(2 * MIB)
    assert device.memory_allocated() == base - 2 * MIB
    b = torch.full((MIB,), 3, dtype=torch.uint8).share_memory_()
    assert device.memory_allocated() == base - 2 * MIB
    assert int(b.sum()) == 3 * MIB
    assert not sim.owns(b)


@pytest.mark.parametrize("name, value", [
    (device.CAPACITY_VARIABLE, "lots"), (device.CAPACITY_VARIABLE, "0"), (device.LINK_VARIABLE, "fast"),
    (device.LINK_VARIABLE, "0"), (device.LINK_VARIABLE, "-1"), (device.LINK_VARIABLE, "nan"),
    (device.LINK_VARIABLE, "inf"), (device.LINK_VARIABLE, ""),
])
def test_bad_settings_are_named_before_anything_is_built(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(device, "_extension", None)
    with pytest.raises(SettingError, match=name):
        device.install()
    assert not list(tmp_path.iterdir())


def test_settings_are_read_at_the_install() -> None:
    done = run_python(
        """
        import os, torch
        from mindspeed_swap.sim import device
        before = torch.ones(4 << 20, dtype=torch.uint8)
        assert not device.installed() and not device.is_device(before)
        device.install()
        assert device.capacity() == 600 << 20 and not device.is_device(before)
        after = torch.ones(1 << 20, dtype=torch.uint8)
        assert device.memory_allocated() == 1 << 20
        device.install(700 << 20)
        assert device.capacity() == 700 << 20
        device.uninstall()
        assert not device.installed()
        later = torch.ones(1 << 20, dtype=torch.uint8)
        assert device.is_device(after) and not device.is_device(later)
        after, before, later = None, None, None
        assert device.memory_allocated() == 0
        print("fine")
        """, MINDSPEED_SWAP_DEVICE_CAPACITY="600MiB", MINDSPEED_SWAP_SIM_LINK_GBPS="2.5")
    assert done.stdout.endswith("fine\n"), done.stderr


# ---- whose memory
def test_owns_is_true_for_live_device_blocks_only(sim: SimAccelerator) -> None:
    ours = torch.arange(1000)
    assert sim.owns(ours) and sim.owns(ours[10:20]) and sim.owns(ours.view(10, 100).t()) and sim.owns(sim.empty(5))
    with device.host_memory():
        hosted = torch.ones(1000)
    array = np.ones(1000)
    mapped = mmap.mmap(-1, 4096)
    mapping = torch.frombuffer(mapped, dtype=torch.uint8)
    foreign = [hosted, torch.from_numpy(array), mapping, torch.empty(3, device="meta")]
    assert not any(sim.owns(tensor) for tensor in foreign)
    sparse = torch.eye(3).to_sparse()
    assert not device.is_device(sparse)
    assert sim.owns(torch.empty(0))
    with torch.device("meta"):
        assert sim.owns(sim.empty(16))  # no matter what the default device is


def test_owns_of_freed_and_reused_addresses(sim: SimAccelerator) -> None:
    owns_pointer = device.extension().owns_pointer
    reused = 0
    for number in range(2000):
        if number >= 50 and reused:
            break
        a = sim.empty(10_000)
        address = a.data_ptr()
        assert owns_pointer(address)
        assert not owns_pointer(address + 64)
        del a
        assert not owns_pointer(address)
        with device.host_memory():
            b = torch.empty(10_000, dtype=torch.uint8)
        reused += b.data_ptr() == address
        assert not sim.owns(b)
    if not reused:
        pytest.skip("the C library never gave a freed address out again")


def test_host_memory_is_not_counted_and_per_thread(sim: SimAccelerator) -> None:
    base = device.memory_allocated()
    inside: list[bool] = []
    with device.host_memory():
        a = torch.ones(MIB)
        with device.host_memory():
            b = a + a
        c = a.clone()
        mine = sim.empty(100)
        thread = threading.Thread(target=lambda: inside.append(sim.owns(torch.ones(10))))
        thread.start()
        thread.join()
    assert sim.owns(mine) and not any(map(sim.owns, (a, b, c))) and inside == [True]
    assert device.memory_allocated() == base + 100
    assert sim.owns(torch.ones(1))


# ---- pressure
def test_pressure_handler_makes_room(sim: SimAccelerator) -> None:
    cache = [sim.empty(4 * MIB) for _ in range(5)]
    leave_free(2 * MIB)
    asked: list[tuple[int, int]] = []

    def handler(nbytes: int, attempt: int) -> bool:
        asked.append((nbytes, attempt))
        cache.pop()
        return True

    assert sim.on_pressure(handler)
    a = sim.empty(9 * MIB)
    assert asked == [(9 * MIB, 0), (9 * MIB, 1)] and a.numel() == 9 * MIB
    sim.on_pressure(None)
    with pytest.raises(torch.OutOfMemoryError):
        sim.empty(9 * MIB)


def test_pressure_in_another_thread_and_in_backward(sim: SimAccelerator) -> None:
    parameter = torch.ones(MIB, requires_grad=True)
    loss = (parameter * 2).sum()
    cache: list[torch.Tensor] = []
    threads: set[int] = set()
    result: list[torch.Tensor] = []

    def fill_up() -> None:
        cache.clear()
        cache.extend(sim.empty(4 * MIB) for _ in range(3))
        leave_free(1)

    def handler(nbytes: int, attempt: int) -> bool:
        threads.add(threading.get_ident())
        return bool(cache) and cache.pop() is not None

    sim.on_pressure(handler)
    fill_up()
    loss.backward()
    assert parameter.grad is not None and bool((parameter.grad == 2).all())
    device.set_capacity(device.memory_allocated() + 16 * MIB)
    fill_up()
    thread = threading.Thread(target=lambda: result.append(torch.cat([parameter.detach(), parameter.detach()])))
    thread.start()
    worker = thread.ident
    thread.join()
    assert len(result) == 1 and threads == {threading.get_ident(), worker}


def test_pressure_is_bounded_and_not_reentrant(sim: SimAccelerator) -> None:
    leave_free(MIB)
    calls: list[int] = []
    inner: list[type] = []

    def handler(nbytes: int, attempt: int) -> bool:
        calls.append(attempt)
        try:
            sim.empty(2 * MIB)
        except torch.OutOfMemoryError as error:
            inner.append(type(error))
        return True

    sim.on_pressure(handler)
    with pytest.raises(torch.OutOfMemoryError):
        sim.empty(2 * MIB)
    assert calls == list(range(16)) and inner == [torch.OutOfMemoryError] * 16


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_exceptions_of_a_handler_count_as_no(sim: SimAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise ValueError("neither")

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    leave_free(MIB)

    def raising(nbytes: int, attempt: int) -> bool:
        raise LookupError("boom")

    for handler, error in ((raising, LookupError), (lambda nbytes, attempt: Undecided(), ValueError)):
        seen.clear()
        sim.on_pressure(handler)  # type: ignore[arg-type]
        with pytest.raises(torch.OutOfMemoryError):
            sim.empty(2 * MIB)
        assert seen == [error]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_handler_is_not_lost(sim: SimAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    leave_free(MIB)

    def interrupted(nbytes: int, attempt: int) -> bool:
        raise KeyboardInterrupt

    sim.on_pressure(interrupted)
    with pytest.raises(KeyboardInterrupt):
        try:
            sim.empty(2 * MIB)
        except torch.OutOfMemoryError:
            time.sleep(1)


def test_pressure_in_a_finaliser_while_an_error_unwinds(sim: SimAccelerator) -> None:
    leave_free(50)

    class AllocatesWhileDying:
        def __del__(self) -> None:
            try:
                sim.empty(100)
            except torch.OutOfMemoryError:
                died.append(True)

    died: list[bool] = []
    sim.on_pressure(lambda nbytes, attempt: False)

    def scope() -> None:
        held = AllocatesWhileDying()  # noqa: F841
        raise KeyError("the first")

    with pytest.raises(KeyError, match="the first") as caught:
        scope()
    del caught
    gc.collect()
    assert died == [True]


def test_many_threads(sim: SimAccelerator) -> None:
    base = device.memory_allocated()
    leave_free(24 * MIB)
    sim.on_pressure(lambda nbytes, attempt: attempt < 3)
    wrong: list[str] = []
    outcomes = {"ok": 0, "oom": 0}
    device.reset_peak()

    def hammer(seed: int) -> None:
        rng = random.Random(seed)
        held: list[torch.Tensor] = []
        for _ in range(400):
            try:
                with device.host_memory():
                    hosted = torch.empty(rng.randrange(1, 5000))
                tensor = sim.empty(rng.choice((100, 5000, MIB, 6 * MIB)))
            except torch.OutOfMemoryError:
                outcomes["oom"] += 1
                held.clear()
                continue
            outcomes["ok"] += 1
            if sim.owns(hosted) or not sim.owns(tensor):
                wrong.append("owner")
            held.append(tensor)
            if len(held) > 3:
                held.pop(rng.randrange(4))

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads) and not wrong
    assert outcomes["ok"] and outcomes["oom"]
    assert device.max_memory_allocated() <= device.capacity()
    assert device.memory_allocated() == base
