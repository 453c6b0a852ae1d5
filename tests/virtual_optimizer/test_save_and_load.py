"""State in host memory is saved, loaded and read like any other, and stays where it is.

Cases 21 to 24 of those that broke others, for torch's own state dicts; Megatron's checkpoints are in test_megatron.py.
"""
from __future__ import annotations

import gc
import io

import pytest
import torch
from adams import (
    MAKES,
    FusedAdam,
    attach,
    differences,
    groups_of,
    parameters,
    same,
    set_gradients,
    train,
)

from mindspeed_swap.sim import device
from mindspeed_swap.virtual_optimizer.swap_tensor import (
    is_swap_tensor,
    swap_tensor_copy_wrapper,
    swap_tensor_func_wrapper,
    to_host,
)

DTYPES = (torch.float32, torch.bfloat16)
AMOUNTS = {"all": None, "number": 500_000}


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with device.host_memory():
        return torch.load(file, weights_only=True)


def trained(make, steps, params=None):
    optimizer = MAKES[make](groups_of(params or parameters(dtypes=DTYPES)))
    train(optimizer, steps)
    return optimizer


@pytest.mark.parametrize("flags", ["on-on", "on-off", "off-on"])
@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("mode", ["mapped", "streamed"])
@pytest.mark.parametrize("make", ["adamw-foreach", "adamw-fused", "step-in-group"])
def test_case_23_mixed_precision_is_resumed(sim, make, mode, amount, flags):
    """Cases 21, 23 and 24: saved and resumed with and without the flag, as if it had never stopped."""
    straight = trained(make, range(5))
    saves, loads = (word == "on" for word in flags.split("-"))
    first = MAKES[make](groups_of(parameters(dtypes=DTYPES)))
    if saves:
        attach(sim, first, mode=mode, amount=AMOUNTS[amount])
    train(first, range(3))
    state = through_a_file(first.state_dict())
    values = [p.detach().clone() for group in first.param_groups for p in group["params"]]

    params = parameters(dtypes=DTYPES)
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)
    second = MAKES[make](groups_of(params))
    if loads:
        attach(sim, second, mode=mode, amount=AMOUNTS[amount])
    second.load_state_dict(state)
    train(second, range(3, 5))
    assert differences(second, straight) == []


def test_a_saved_file_has_the_state_and_no_more(sim):
    optimizer = trained("adamw-foreach", range(1))
    plain = io.BytesIO()
    torch.save(optimizer.state_dict(), plain)
    attach(sim, optimizer)
    virtual = io.BytesIO()
    torch.save(optimizer.state_dict(), virtual)
    assert len(virtual.getvalue()) == pytest.approx(len(plain.getvalue()), rel=0.01)


@pytest.mark.parametrize("make", ["adamw-foreach", "step-in-group"])
def test_loading_takes_no_device_memory(sim, make):
    optimizer = MAKES[make](groups_of(parameters()))
    virtual = attach(sim, optimizer)
    state = through_a_file(trained(make, range(2), parameters()).state_dict())
    gc.collect()
    device.reset_peak()
    base = device.memory_allocated()
    optimizer.load_state_dict(state)
    assert device.max_memory_allocated() - base < 0.02 * virtual.moments_bytes
    assert not any(sim.owns(optimizer.state[p]["exp_avg"]) for g in optimizer.param_groups for p in g["params"])


def test_loading_its_own_state(sim):
    """Megatron's distributed optimizer does that, to make room for what it then loads in place."""
    optimizer = MAKES["adamw-foreach"](groups_of(parameters(dtypes=DTYPES)))
    attach(sim, optimizer)
    train(optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, range(2, 5))
    assert differences(optimizer, trained("adamw-foreach", range(5))) == []


def test_one_step_tensor_for_all(sim, capsys):
    """As Megatron without apex loads it: each parameter gets one of its own, and the log says so."""
    optimizer = MAKES["adamw-foreach"](groups_of(parameters(dtypes=DTYPES)))
    attach(sim, optimizer)
    train(optimizer, range(2))
    state = optimizer.state_dict()
    step = torch.tensor(2.0)
    for entries in state["state"].values():
        entries["step"] = step
    optimizer.load_state_dict(state)
    assert "shared one step count" in capsys.readouterr().out
    train(optimizer, range(2, 5))
    assert differences(optimizer, trained("adamw-foreach", range(5))) == []


def test_state_made_by_somebody_else_is_taken_in(sim):
    """Transformer Engine's FusedAdam makes its state anew after a load."""

    class Remaking(FusedAdam):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            for p in [p for group in self.param_groups for p in group["params"]]:
                self.state[p] = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}

    saved = trained("step-in-group", range(3))
    params = [p for group in saved.param_groups for p in group["params"]]
    optimizer = Remaking(groups_of(params))
    attach(sim, optimizer)
    optimizer.load_state_dict(saved.state_dict())
    assert not any(sim.owns(value) for p in params for value in optimizer.state[p].values())
    train(optimizer, range(3, 5))
    assert differences(optimizer, trained("step-in-group", range(5))) == []


def test_a_load_that_does_not_fit_says_what_torch_says(sim):
    optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
    attach(sim, optimizer)
    train(optimizer, range(1))
    other = trained("adamw-foreach", range(1), parameters(((3,), (4,))))
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(other.state_dict())
    train(optimizer, range(1, 5))
    assert differences(optimizer, trained("adamw-foreach", range(5), parameters())) == []


@pytest.mark.parametrize("masters", [False, True])
def test_case_22_weights_loaded_after_the_optimizer_was_built(sim, masters):
    """Case 22: a step with lr 0 writes back the new weights, not the old ones."""
    params = parameters()
    optimizer = torch.optim.AdamW([{"params": params, "lr": 0.0}])
    attach(sim, optimizer, masters=params if masters else ())
    with torch.no_grad():
        for p in params:
            p.copy_(torch.full_like(p, 3.25))
    set_gradients(params, 0)
    optimizer.step()
    assert all(bool((p == 3.25).all()) for p in params)


# ---- access
def test_reading(sim):
    optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
    attach(sim, optimizer)
    train(optimizer, range(2))
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        moment = optimizer.state[p]["exp_avg"]
        assert is_swap_tensor(moment) and is_swap_tensor(moment.detach()) and is_swap_tensor(moment[:1])
        copy = to_host(moment)
        assert same(copy, moment.contiguous()) and not is_swap_tensor(copy) and not sim.owns(copy)
        before = copy.clone()
        moment.zero_()
        assert same(copy, before)
        assert "tensor(" in repr(moment)
    assert not is_swap_tensor(p) and not is_swap_tensor(None)


def test_the_wrappers_of_the_documentation(sim):
    optimizer = MAKES["adamw-foreach"](groups_of(parameters()))
    attach(sim, optimizer)
    train(optimizer, range(2))
    p = optimizer.param_groups[1]["params"][0]
    moment, plain = optimizer.state[p]["exp_avg"], torch.zeros_like(p, requires_grad=False)
    copy_ = swap_tensor_copy_wrapper(torch.Tensor.copy_)
    values = to_host(moment)
    assert copy_(plain, moment) is plain and same(plain, values)
    doubled = plain * 2
    assert copy_(moment, doubled) is moment and same(moment, doubled)
    assert copy_(moment, optimizer.state[p]["exp_avg_sq"]) is moment
    assert copy_(plain, doubled) is plain and same(plain, doubled)
    for name in ("cpu", "clone", "detach"):
        wrapped = swap_tensor_func_wrapper(getattr(torch.Tensor, name), name)
        assert same(wrapped(moment), moment) and same(wrapped(plain), plain)
    detached = swap_tensor_func_wrapper(torch.Tensor.detach, "detach")(moment)
    assert detached.swap_tensor and is_swap_tensor(detached)
    with pytest.raises(ValueError, match="func_type 'float' not supported"):
        swap_tensor_func_wrapper(torch.Tensor.float, "float")
