"""Adam's state as the optimizer itself would make it at its first step: what it holds, of which type, of which shape.

Torch's Adam and AdamW keep a ``step`` beside the moments of each parameter. Fused ones of other makers (apex,
Transformer Engine, MindSpeed) keep it in the parameter group and have moments in fp32 whatever the parameter is.
"""
from __future__ import annotations

from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "param"  # not a state key: the parameter itself


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for what we know how to make state for: torch's own, or a class with Adam in its name or a base's."""
    return any("adam" in kind.__name__.lower() for kind in type(optimizer).__mro__)


def has_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def moment_keys(group: dict[str, Any]) -> tuple[str, ...]:
    return (*MOMENTS, "max_exp_avg_sq") if group.get("amsgrad") else MOMENTS


def moment_dtype(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if has_step_per_parameter(optimizer) else torch.float32


def shaped_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``flat`` (as many elements) with the shape and strides of ``torch.zeros_like(parameter)``."""
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


def complete_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Make what is missing of a parameter's state, on the device. Entries that are there stay."""
    state = optimizer.state[parameter]
    if has_step_per_parameter(optimizer) and "step" not in state:
        if group.get("capturable") or group.get("fused"):
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        else:  # on the host, as in torch: see its note [special device hosting for step]
            double = torch.get_default_dtype() is torch.float64
            state["step"] = torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)
    for key in moment_keys(group):
        if key not in state:
            dtype = moment_dtype(optimizer, parameter)
            state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()


def own_steps(optimizer: torch.optim.Optimizer) -> int:
    """Give each parameter a ``step`` tensor of its own; returns how many shared one.

    Megatron without apex and Transformer Engine loads one tensor for all: each parameter would then advance it for all.
    """
    seen: set[int] = set()
    shared = 0
    for state in optimizer.state.values():
        step = state.get("step")
        if not isinstance(step, torch.Tensor):
            continue
        if step.untyped_storage()._cdata in seen:
            state["step"] = step.clone()
            shared += 1
        seen.add(state["step"].untyped_storage()._cdata)
    return shared
