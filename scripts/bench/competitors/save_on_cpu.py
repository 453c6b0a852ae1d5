"""PyTorch's ``torch.autograd.graph.save_on_cpu``, with pinned memory, around each microbatch's forward."""
from __future__ import annotations

import functools
from typing import Any

from points import Context, Point


def points(context: Context) -> list[Point]:
    return [Point("save_on_cpu", "save_on_cpu", plugin="save_on_cpu")]


def install(setting: str) -> None:
    import torch
    from megatron.core.pipeline_parallel import schedules

    original = schedules.forward_step

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return original(*args, **kwargs)

    schedules.forward_step = forward_step
