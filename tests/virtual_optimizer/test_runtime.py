"""The runtime gives the virtual optimizer's buffers up where they would be in the way."""
from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from mindspeed_swap.options import Options
from mindspeed_swap.runtime import Runtime
from mindspeed_swap.sim import device
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.units import MIB


class Overlap:
    """What the runtime calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.buffer: torch.Tensor | None = None
        self.step = self.forward = lambda *args: nullcontext()

    def settle(self) -> None:
        self.calls.append("settle")

    def give_up(self) -> int:
        self.calls.append("give up")
        freed, self.buffer = 0 if self.buffer is None else self.buffer.nbytes, None
        return freed

    def layer(self, entering: torch.Tensor) -> None:
        pass

    def optimizer(self) -> None:
        pass


@pytest.fixture
def running(sim, monkeypatch):
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    runtime = Runtime(Options(True, None, None, "model=test", policy=Policy()), 256 * MIB)
    runtime.install_overlap(Overlap())
    yield runtime
    runtime.close()


def test_an_evaluation_has_the_memory_to_itself(running):
    running.microbatch(None)
    assert running._overlap.calls == ["settle"]


def test_a_recorded_step_begins_without_buffers(running):
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = type("Optimizer", (), {"optimizer": torch.optim.SGD([weight])})()
    with running.step([torch.nn.Linear(2, 2)], optimizer, 1):
        assert running.manager.recorder is not None
        assert running._overlap.calls == ["settle"]


def test_buffers_go_before_anything_is_evicted(running, monkeypatch):
    overlap = running._overlap
    overlap.buffer = torch.empty(8 * MIB, dtype=torch.uint8)
    monkeypatch.setattr(running.manager, "evict", lambda nbytes: overlap.calls.append("evict") or 0)
    gc.collect()  # of earlier tests
    device.set_capacity(device.memory_allocated() + MIB)
    torch.empty(6 * MIB, dtype=torch.uint8)
    assert overlap.calls == ["give up"]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8)
    assert overlap.calls[:3] == ["give up", "give up", "evict"]
