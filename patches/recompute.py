"""Megatron's own recompute, which must go together with swap.

``checkpoint`` (full recompute; core_attn, mlp): saves its inputs after the layers that it runs have returned. They are
told to belong to the last of those layers, or the inputs of all layers would pass for one large layer.

``CheckpointWithoutOutput`` (layernorm, moe_act, mla_up_proj) has three peculiarities:

1. It empties the storage of its output after the consumer has saved it and fills it again in backward. Those storages
   are its own business: never copied, never evicted.
2. It saves detached inputs. A saved leaf is held by its gradient accumulator, so those inputs would stay on the device
   whatever is done about them. Saved as they are they can go; its recompute detaches what it reads in any case.
3. Without Transformer Engine it dies of a NameError: whether fp8 is on is asked of Transformer Engine, always. Without
   Transformer Engine it is off.
"""
from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from mindspeed_swap import runtime
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.patches.ctx import CtxProxy
from mindspeed_swap.patches.registry import Patch, in_place_of

_RANDOM = "megatron.core.tensor_parallel.random"
_told_no_fp8 = False


@in_place_of
def _checkpoint(original: Any, function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
    with runtime.get().recomputed():
        return original(function, distribute_saved_activations, *args)


@in_place_of
def _checkpoint_without_output(original: Any, self: Any, run_function: Any, *args: Any, **kwargs: Any) -> Any:
    _mend_fp8(self)
    outputs = original(self, run_function, *args, **kwargs)
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(output, torch.Tensor):
            runtime.get().will_vanish(output)
    return outputs


def _mend_fp8(checkpoint: Any) -> None:
    global _told_no_fp8
    if not getattr(checkpoint, "fp8", False) or hasattr(sys.modules[_RANDOM], "FP8GlobalStateManager"):
        return
    checkpoint.fp8 = False
    if not _told_no_fp8:
        _told_no_fp8 = True
        say(
            "this Megatron's --recompute-modules layernorm, moe_act and mla_up_proj need Transformer Engine, by "
            "mistake (NameError: FP8GlobalStateManager); mended for this run: fp8 is off without it"
        )


@in_place_of
def _save_inputs(original: Any, ctx: Any, run_function: Any, checkpoint: Any, *args: Any) -> Any:
    if not _detaches_what_it_reads():
        raise SettingError(
            "--recompute-modules layernorm, moe_act and mla_up_proj of this Megatron lose gradients while saved "
            "tensors are swapped: use megatron-core 0.16 or newer, or leave these modules out"
        )
    # It saves the inputs themselves in place of their detached doubles.
    stand_in = CtxProxy(ctx, save_for_backward=lambda *detached: ctx.save_for_backward(*args))
    outputs = original(stand_in, run_function, checkpoint, *args)
    checkpoint.ctx = ctx  # it has kept the stand-in
    return outputs


@functools.cache
def _detaches_what_it_reads() -> bool:
    """Older ones take the gradients from a second read of the saved tensors, which under hooks gives other tensors."""
    backward = sys.modules[_RANDOM].CheckpointWithoutOutputFunction.backward
    return "inputs" in backward.__code__.co_names  # as an attribute of ctx


PATCHES: list[Patch] = [
    (f"{_RANDOM}.checkpoint", _checkpoint),
    (f"{_RANDOM}.CheckpointWithoutOutput.checkpoint", _checkpoint_without_output),
    (f"{_RANDOM}.CheckpointWithoutOutputFunction.forward", _save_inputs),
]
