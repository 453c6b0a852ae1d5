"""Parameters, moments and step counts after several steps equal those of the plain optimizer, bit for bit."""
from __future__ import annotations

import gc

import pytest
import torch
from adams import (
    MAKES,
    attach,
    differences,
    groups_of,
    parameters,
    set_gradients,
    train,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from mindspeed_swap.sim import device

F32, BF16 = torch.float32, torch.bfloat16
MODES = ("mapped", "streamed")
ALL = None
SOME = 500_000  # bytes: of 1.3 MB, so that in one parameter one moment moves and the other stays


def plain(make, dtypes=(F32,), steps=range(5)):
    optimizer = MAKES[make](groups_of(parameters(dtypes=dtypes)))
    train(optimizer, steps)
    return optimizer


@pytest.mark.parametrize("amount", [ALL, SOME])
@pytest.mark.parametrize("dtypes", [(F32,), (F32, BF16)], ids=["fp32", "mixed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", MAKES)
def test_same_bits(sim, late_writes, make, mode, dtypes, amount):
    optimizer = MAKES[make](groups_of(parameters(dtypes=dtypes)))
    virtual = attach(sim, optimizer, mode=mode, amount=amount)
    assert virtual.moments_bytes > 0
    train(optimizer, range(5))
    assert differences(optimizer, plain(make, dtypes)) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", ["adamw-foreach", "adamw-fused", "step-in-group"])
def test_main_parameters_too(sim, make, mode):
    params = parameters()
    optimizer = MAKES[make](groups_of(params))
    virtual = attach(sim, optimizer, mode=mode, masters=params)
    assert virtual.master_bytes == sum(p.nbytes for p in params)
    assert not any(sim.owns(p) for p in params)
    train(optimizer, range(5))
    assert differences(optimizer, plain(make)) == []


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_come_and_go(sim, mode):
    """A parameter without a gradient is not updated, and its step count stays."""

    def run(virtual):
        params = parameters()
        optimizer = MAKES["adamw-foreach"](groups_of(params))
        if virtual:
            attach(sim, optimizer, mode=mode)
        for step in range(6):
            set_gradients(params, step)
            if step:
                params[2].grad = None if step % 2 else params[2].grad
                params[step % 6].grad = None
            optimizer.step()
        return optimizer

    assert differences(run(True), run(False)) == []


def test_strides_are_kept(sim):
    params = [torch.nn.Parameter(torch.randn(8, 16, 4, 4).to(memory_format=torch.channels_last)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params)
    attach(sim, optimizer)
    train(optimizer, range(2))
    assert all(optimizer.state[p]["exp_avg"].stride() == p.stride() for p in params)


@pytest.mark.parametrize("mode", MODES)
def test_started_late(sim, mode):
    """State that the optimizer has already is taken over, and its device memory given up."""
    optimizer = MAKES["adamw-fused"](groups_of(parameters()))
    train(optimizer, range(2))
    gc.collect()  # of earlier tests
    before = device.memory_allocated()
    virtual = attach(sim, optimizer, mode=mode)
    assert before - device.memory_allocated() == pytest.approx(virtual.moments_bytes, rel=0.001)
    train(optimizer, range(2, 5))
    assert differences(optimizer, plain("adamw-fused")) == []


def test_a_group_added_later_stays_on_the_device(sim):
    def run(virtual):
        optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
        if virtual:
            attach(sim, optimizer)
        train(optimizer, range(1))
        optimizer.add_param_group({"params": parameters(((9, 9), (5,))), "lr": 0.1})
        train(optimizer, range(1, 3))
        return optimizer

    assert differences(run(True), run(False)) == []


def test_hooks_fire_once_and_closures_run_once(sim):
    params = parameters()
    optimizer = MAKES["adamw-foreach"](groups_of(params))
    attach(sim, optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    glob = register_optimizer_step_post_hook(lambda *args: calls.append("everywhere"))

    def closure():
        assert torch.is_grad_enabled()
        set_gradients(params, 0)
        calls.append("closure")
        return 7.0

    try:
        assert optimizer.step(closure) == 7.0
    finally:
        glob.remove()
    assert calls == ["before", "closure", "after", "everywhere"]


def test_torch_schedulers_work(sim):
    def run(virtual):
        optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
        if virtual:
            attach(sim, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            train(optimizer, range(step, step + 1))
            scheduler.step()
        return optimizer

    assert differences(run(True), run(False)) == []


def test_nothing_on_tensor_is_patched(sim):
    before = {kind: dict(vars(kind)) for kind in torch.Tensor.__mro__}
    optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
    attach(sim, optimizer)
    train(optimizer, range(1))
    assert all(vars(kind)[name] is value for kind, methods in before.items() for name, value in methods.items())


def test_an_error_in_the_step_leaves_state_at_rest(sim, late_writes):
    """Out of memory, for one: the user may free something and go on."""
    params = parameters()
    optimizer = MAKES["adamw-foreach"](groups_of(params))
    attach(sim, optimizer)
    train(optimizer, range(2))
    lists = [list(group["params"]) for group in optimizer.param_groups]
    set_gradients(params, 2)
    own_step, calls = type(optimizer).step.__wrapped__, []

    def failing(self, closure=None):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("on purpose")
        return own_step(self)

    streamed = optimizer.step.__func__.__wrapped__.__closure__[0].cell_contents
    streamed._own_step = failing
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert set(optimizer.state) == set(params)
    assert not any(sim.owns(optimizer.state[p][key]) for p in params for key in ("exp_avg", "exp_avg_sq"))
