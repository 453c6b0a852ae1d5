"""Optimizers, parameters and gradients to train with, with and without the virtual optimizer, on any device.

The GPU tests use this too.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from simulated import new_pool

from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer.amount import VirtualOptions
from mindspeed_swap.virtual_optimizer.virtual_optimizer import VirtualOptimizer


class FusedAdam(torch.optim.Optimizer):
    """A stand-in for apex's, Transformer Engine's and MindSpeed's: the step is the group's, moments are fp32, state is
    made at the first step, empty tensors are refused, a load makes the state again after torch's own has cast it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                assert p.numel(), "empty tensors make the kernel fail"
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                m, v, grad = state["exp_avg"], state["exp_avg_sq"], p.grad.float()
                m.mul_(beta1).add_(grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = (m / correction1) / ((v / correction2).sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_((group["lr"] * update).to(p.dtype))


    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, number in zip(params, numbers, strict=True):
            entries = state_dict["state"].get(number, {})
            self.state[p] = {key: torch.zeros_like(p, dtype=torch.float32).copy_(v) for key, v in entries.items()}


Make = Callable[[Any], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adamw-single": lambda groups: torch.optim.AdamW(groups, foreach=False),
    "adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.01),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "step-in-group": FusedAdam,
}

SHAPES = ((64, 33), (7,), (300, 500), (1,), (128, 64), (64,))


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtypes: Sequence[torch.dtype] = (torch.float32,), device: str = "cpu"
) -> list[torch.nn.Parameter]:
    """The same values in every call; dtypes take turns."""
    random = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=random).to(device, dtypes[i % len(dtypes)], copy=True))
        for i, shape in enumerate(shapes)
    ]


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    half = len(params) // 2
    return [{"params": params[:half], "lr": 1e-2}, {"params": params[half:], "lr": 3e-3, "weight_decay": 0.0}]


def set_gradients(params: Sequence[torch.nn.Parameter], step: int) -> None:
    """The same for the same step."""
    random = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=random).to(p.device, p.dtype, copy=True)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def attach(
    accelerator: Any,
    *optimizers: torch.optim.Optimizer,
    mode: str = "streamed",
    amount: int | None = None,
    masters: Sequence[torch.Tensor] = (),
    host_bytes: int = 64 * MIB,
) -> VirtualOptimizer:
    """``amount`` in bytes, None for all."""
    options = VirtualOptions((amount,), mode, bool(masters))
    virtual = VirtualOptimizer(options, accelerator, new_pool(accelerator, host_bytes))
    virtual.attach(optimizers, masters)
    return virtual


def differences(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> list[str]:
    """What is not equal, bit for bit: parameters, every entry of their state, step counts in the groups."""
    found = []
    for number, (ours, theirs) in enumerate(zip(a.param_groups, b.param_groups, strict=True)):
        if ours.get("step") != theirs.get("step"):
            found.append(f"group {number} step: {ours.get('step')} {theirs.get('step')}")
        for i, (p, q) in enumerate(zip(ours["params"], theirs["params"], strict=True)):
            if not same(p, q):
                found.append(f"parameter {number}.{i}")
            if set(a.state[p]) != set(b.state[q]):
                found.append(f"state of {number}.{i}: {set(a.state[p])} {set(b.state[q])}")
            found += [f"{key} of {number}.{i}" for key, value in a.state[p].items() if not same(value, b.state[q][key])]
    return found


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))
