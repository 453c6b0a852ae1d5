"""The borders of a training step, and of the optimizer within it."""
from __future__ import annotations

import functools
import inspect
from typing import Any

from mindspeed_swap import runtime
from mindspeed_swap.core.frame_room import with_room
from mindspeed_swap.log import speak_for_stage
from mindspeed_swap.patches.modules import layer_names
from mindspeed_swap.patches.random_state import MegatronRandomState
from mindspeed_swap.patches.registry import Patch, in_place_of


def _train_step(original: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    signature = inspect.signature(original)
    once, random = functools.cache(_meet_peers), MegatronRandomState()

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        running = runtime.get()
        given = signature.bind(*args, **kwargs).arguments
        models = given["model"] if isinstance(given["model"], list) else [given["model"]]
        if running.shapes is not None:
            once()
            running.manager.calls.random = random
        fine = running.fine
        if fine is not None and fine.parts is None:
            fine.meet(layer_names(models), parallel_state.get_pipeline_model_parallel_rank())
        with running.step(models, given["optimizer"], get_num_microbatches()):
            return with_room(original, *args, **kwargs)

    return train_step


def _meet_peers() -> None:
    """Stages hold different layers for different times, so their plans differ; within a stage there is one."""
    from megatron.core import parallel_state

    several = parallel_state.get_pipeline_model_parallel_world_size() > 1
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank(True) == 0
    if several and first:
        speak_for_stage()
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )  # fmt: skip
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    runtime.get().meet_peers(group, entangled=max(sizes) > 1)


@in_place_of
def _optimizer_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    runtime.get().enter_optimizer()
    return original(self, *args, **kwargs)


PATCHES: list[Patch] = [
    ("megatron.training.training.train_step", _train_step),
    ("megatron.core.optimizer.optimizer.ChainedOptimizer.step", _optimizer_step),
    ("megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.step", _optimizer_step),
    ("megatron.core.optimizer.optimizer.FP32Optimizer.step", _optimizer_step),
]
