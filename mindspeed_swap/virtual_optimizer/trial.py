"""Which of the two ways is the faster one here, for this optimizer's kernel: measured at start on a small parameter.

Within the optimizer's step alone: where streamed copies overlap with the rest of the step (overlap.py) it costs less.
"""
from __future__ import annotations

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer.arena import Arena, choose
from mindspeed_swap.virtual_optimizer.streamed import Streamed

# Of this its moments are SLICES slices as large as a model's: smaller ones take the host longer than the link.
PARAMETER_BYTES = 128 * MIB
SLICES = 8
STEPS = 3  # timed together, after one that sets things up

Optimizer = torch.optim.Optimizer


def step_ms(optimizer: Optimizer, accelerator: Accelerator, pool: HostPool) -> dict[str, float] | None:
    """By mode, of a step of a parameter of PARAMETER_BYTES. None if it cannot be tried: no memory for it, or an
    optimizer that is not made from its groups alone."""
    try:
        return {mode: _measured(optimizer, accelerator, pool, mode) for mode in ("streamed", "mapped")}
    except (RuntimeError, AssertionError, MemoryError, TypeError, ValueError):  # out of memory is a RuntimeError
        return None


def _measured(like: Optimizer, accelerator: Accelerator, pool: HostPool, mode: str) -> float:
    parameter, gradient = (accelerator.empty(PARAMETER_BYTES).view(torch.float32).zero_() for _ in range(2))
    parameter = torch.nn.Parameter(parameter)
    parameter.grad = gradient
    optimizer = type(like)([{**like.param_groups[0], "params": [parameter]}])  # type: ignore[call-arg]
    arena = Arena(optimizer, choose(optimizer, accelerator, None), accelerator, pool)
    try:
        if mode == "streamed":
            streams = accelerator.new_stream(), accelerator.new_stream()
            Streamed(arena, accelerator, streams, slice_bytes=arena.nbytes // SLICES)
        optimizer.step()
        start = accelerator.record(accelerator.compute_stream())
        for _ in range(STEPS):
            optimizer.step()
        end = accelerator.record(accelerator.compute_stream())
        accelerator.synchronize(end)
        return accelerator.elapsed_ms(start, end) / STEPS
    finally:
        accelerator.synchronize()
        # Its ``step`` refers to it in a circle: what is large goes now, not with the next garbage collection.
        parameter.grad, parameter.data = None, parameter.data.new_empty(0)
        optimizer.state.clear()
        arena.give_back(pool)
