"""Megatron's ``CheckpointWithoutOutput`` empties the storage of its output after the consumer has saved it and fills
it again in backward. Those storages are its own business: never copied, never evicted."""
from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Patch


def _checkpoint(original: Any) -> Any:
    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, run_function, *args, **kwargs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, torch.Tensor):
                runtime.get().will_vanish(output)
        return outputs

    return checkpoint


PATCHES: list[Patch] = [("megatron.core.tensor_parallel.random.CheckpointWithoutOutput.checkpoint", _checkpoint)]
