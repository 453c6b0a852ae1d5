"""The caching allocator of torch_npu under our hook: figures, limits, and out of memory -> evict -> retry."""
from __future__ import annotations

import sys

import pytest
import torch
from npu_device import CAPACITY, UNIT, device, fake, holds, manager_of, marked

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import MIB

FITTING = CAPACITY // UNIT


class Evictor:
    """Copies kept tensors to page-locked memory on a side stream, oldest first, until ``nbytes`` are free."""

    def __init__(self, accelerator) -> None:
        self.accelerator, self.stream = accelerator, accelerator.new_stream()
        self.pool = HostPool(accelerator, 256 * MIB)
        self.kept: list[torch.Tensor] = []
        self.on_host: list[torch.Tensor] = []
        self.calls: list[tuple[int, int]] = []

    def __call__(self, nbytes: int, attempt: int) -> bool:
        self.calls.append((nbytes, attempt))
        accelerator, freed = self.accelerator, 0
        while self.kept and freed < nbytes:
            tensor = self.kept.pop(0)
            block = self.pool.alloc(tensor.numel())
            compute = accelerator.compute_stream()
            accelerator.wait(self.stream, accelerator.record(compute))
            accelerator.copy(block.tensor, tensor, self.stream)
            accelerator.wait(compute, accelerator.record(self.stream))
            self.on_host.append(block.tensor)
            freed += tensor.numel()
            del tensor
        return freed > 0


def test_out_of_memory_is_caught_in_the_allocator(npu, capsys):
    assert npu.on_pressure(lambda nbytes, attempt: False)
    assert npu.memory().capacity_bytes == CAPACITY


def test_figures(npu):
    before = npu.memory().allocated_bytes
    npu.take_interval()
    first, second = npu.empty(3 * UNIT), npu.empty(UNIT)
    del first
    interval = npu.take_interval()
    assert interval.largest_request_bytes == 3 * UNIT
    assert 4 * UNIT <= interval.peak_bytes - before < 4 * UNIT + MIB
    assert UNIT <= npu.memory().allocated_bytes - before < UNIT + MIB
    assert npu.owns(second) and not npu.owns(torch.ones(3))


def test_more_than_the_device_has_is_refused():
    with pytest.raises(SettingError, match="is more than the"), device(1 << 40):
        pass


def test_evict_and_retry(npu):
    evictor = Evictor(npu)
    assert npu.on_pressure(evictor)
    for number in range(2 * FITTING):
        evictor.kept.append(marked(UNIT, number))
    assert len(evictor.on_host) >= FITTING and all(nbytes == UNIT for nbytes, _ in evictor.calls)
    for number, tensor in enumerate(evictor.on_host + evictor.kept):
        assert holds(tensor, number)
    evictor.kept.clear()
    evictor.pool.close()


def test_evict_and_retry_in_backward_with_slow_copies(npu):
    """The handler runs in autograd's thread, and compute waits for its copies."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, UNIT // 4).npu())

    def gradient(kept: list[torch.Tensor], fill: bool) -> torch.Tensor:
        weight.grad = None
        hidden = weight
        for _ in range(3):
            hidden = torch.tanh(hidden * weight)
        while fill and len(kept) < 64 and npu.memory().allocated_bytes + UNIT <= CAPACITY:
            kept.append(marked(UNIT, len(kept)))
        hidden.sum().backward()
        return weight.grad.cpu()

    plain = gradient([], fill=False)
    evictor = Evictor(npu)
    npu.on_pressure(evictor)
    fake.fakecann_set_link(1, 1)
    assert torch.equal(gradient(evictor.kept, fill=True), plain)
    assert evictor.on_host, "backward was to run out of memory"
    for number, tensor in enumerate(evictor.on_host + evictor.kept):
        assert holds(tensor, number)
    npu.on_pressure(None)
    evictor.kept.clear()
    evictor.pool.close()


def test_too_small_a_device_fails_as_without_us(npu):
    calls = []
    npu.on_pressure(lambda nbytes, attempt: calls.append(attempt) or True)  # promises, and frees nothing
    with pytest.raises(torch.OutOfMemoryError):
        npu.empty(2 * CAPACITY)
    assert calls == list(range(8))  # bounded


def test_a_handler_that_raises_is_a_no(npu, monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_value))

    def raising(nbytes, attempt):
        raise ValueError("from the handler")

    npu.on_pressure(raising)
    with pytest.raises(torch.OutOfMemoryError):
        npu.empty(2 * CAPACITY)
    assert [str(error) for error in raised] == ["from the handler"]


def test_the_manager_evicts_what_it_keeps(npu):
    with manager_of(npu, host_bytes=256 * MIB) as manager:
        guard = OomGuard(manager)
        assert not guard.ahead
        manager.begin_step()
        weight = torch.nn.Parameter(torch.linspace(-1, 1, UNIT // 4).npu())
        with manager.forward(0):
            hidden = weight * 1.0
            for _ in range(2 * FITTING):
                hidden = torch.tanh(hidden)
            loss = hidden.sum()
        del hidden
        loss.backward()
        stats, _ = manager.end_step()
        assert stats.evictions > 0 and stats.evicted_bytes >= FITTING * UNIT
        x = torch.linspace(-1, 1, UNIT // 4, requires_grad=True)
        y = x
        for _ in range(2 * FITTING):
            y = torch.tanh(y)
        y.sum().backward()
        assert torch.allclose(weight.grad.cpu(), x.grad)
        guard.close()
        del loss
    with device(), pytest.raises(torch.OutOfMemoryError):  # without us it does not fit
        hidden = torch.nn.Parameter(torch.linspace(-1, 1, UNIT // 4).npu())
        for _ in range(2 * FITTING):
            hidden = torch.tanh(hidden)


def test_without_the_hook_it_evicts_ahead(capsys):
    with device(hook="0") as npu, manager_of(npu, host_bytes=256 * MIB) as manager:
        assert "evicting ahead" in capsys.readouterr().out
        guard = OomGuard(manager)
        assert guard.ahead
        manager.begin_step()
        weight = torch.nn.Parameter(torch.linspace(-1, 1, UNIT // 4).npu())
        with manager.forward(0):
            hidden = weight * 1.0
            for _ in range(2 * FITTING):
                hidden = torch.tanh(hidden)
        assert manager.stats.evictions > 0
        del hidden
        guard.close()
