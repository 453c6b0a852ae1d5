"""The borders of a training step, and of the optimizer within it."""
from __future__ import annotations

import functools
import inspect
from typing import Any

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Patch


def _train_step(original: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        models = given["model"] if isinstance(given["model"], list) else [given["model"]]
        # The ranks that run the same layers: of one pipeline stage.
        peers = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        with runtime.get().step(models, given["optimizer"], get_num_microbatches(), peers):
            return original(*args, **kwargs)

    return train_step


def _optimizer_step(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime.get().enter_optimizer()
        return original(self, *args, **kwargs)

    return step


PATCHES: list[Patch] = [
    ("megatron.training.training.train_step", _train_step),
    ("megatron.core.optimizer.optimizer.ChainedOptimizer.step", _optimizer_step),
    ("megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.step", _optimizer_step),
    ("megatron.core.optimizer.optimizer.FP32Optimizer.step", _optimizer_step),
]
