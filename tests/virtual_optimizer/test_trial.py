"""``--virtual-optimizer-mode auto`` takes what is faster here."""
from __future__ import annotations

import gc

import pytest
import torch
from adams import FusedAdam, attach, differences, groups_of, parameters, train

from mindspeed_swap.sim import device
from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer import trial, virtual_optimizer


@pytest.fixture
def undecided(sim):
    """A device of which nothing is known beforehand."""
    return type("Undecided", (type(sim),), {"kernels_use_host_memory_best": None})()


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam])
def test_measured(undecided, monkeypatch, capsys, make):
    """Kernels use host memory at memory's speed on the simulated device: over a slow link streamed loses."""
    monkeypatch.setattr(trial, "PARAMETER_BYTES", MIB)
    device.set_link(0.02, 0.02)
    optimizer, plain = make(groups_of(parameters())), make(groups_of(parameters()))
    virtual = attach(undecided, optimizer, mode="auto")
    assert virtual.summary()["mode"] == "mapped"
    assert "of parameters streamed" in capsys.readouterr().out
    train(optimizer, range(2))
    train(plain, range(2))
    assert differences(optimizer, plain) == []


@pytest.mark.parametrize(("took", "mode"), [
    ({"streamed": 3.0, "mapped": 1.0}, "mapped"), ({"streamed": 1.5, "mapped": 1.0}, "streamed"),
    ({"streamed": 1.0, "mapped": 2.0}, "streamed"), (None, "streamed"),
])  # fmt: skip
def test_the_faster_one(undecided, monkeypatch, took, mode):
    monkeypatch.setattr(virtual_optimizer, "step_ms", lambda *args: took)
    assert attach(undecided, torch.optim.AdamW(parameters()), mode="auto").summary()["mode"] == mode


def test_nothing_is_left_behind(undecided, monkeypatch):
    monkeypatch.setattr(trial, "PARAMETER_BYTES", MIB)
    pool = attach(undecided, torch.optim.AdamW(parameters()), mode="streamed")._pool
    like = torch.optim.AdamW(parameters())
    gc.collect()
    gc.disable()  # a collection may be far away
    try:
        used, allocated = pool.used_bytes, device.memory_allocated()
        assert trial.step_ms(like, undecided, pool) is not None
        assert pool.used_bytes == used and device.memory_allocated() == allocated
    finally:
        gc.enable()


def test_an_optimizer_that_cannot_be_tried_is_streamed(undecided, monkeypatch):
    class Particular(torch.optim.AdamW):
        def __init__(self, groups, made_by_its_user=False):
            if not made_by_its_user:
                raise RuntimeError("not by you")
            super().__init__(groups)

    optimizer = Particular(parameters(), made_by_its_user=True)
    assert attach(undecided, optimizer, mode="auto").summary()["mode"] == "streamed"


def test_no_memory_to_try(undecided):
    pool = attach(undecided, torch.optim.AdamW(parameters()), mode="streamed", host_bytes=8 * MIB)._pool
    assert trial.step_ms(torch.optim.AdamW(parameters()), undecided, pool) is None


def test_known_beforehand(sim):
    assert attach(sim, torch.optim.AdamW(parameters()), mode="auto").summary()["mode"] == "streamed"
