"""Every forward of a microbatch, in every schedule, goes through ``schedules.forward_step``."""
from __future__ import annotations

from typing import Any

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Patch, in_place_of


@in_place_of
def _forward_step(
    original: Any, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    with runtime.get().microbatch(model):
        return original(forward_step_func, data_iterator, model, *args, **kwargs)


PATCHES: list[Patch] = [("megatron.core.pipeline_parallel.schedules.forward_step", _forward_step)]
