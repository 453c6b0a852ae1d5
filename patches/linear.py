"""Gives the linear layer's backward the Parameter itself.

With saved-tensor hooks active autograd rebuilds every saved tensor, so the weight that backward gets is not the
Parameter and has no ``main_grad`` and no ``grad_added_to_main_grad``. With gradient accumulation fusion Megatron then
dies ("param.grad being None is not safe ..."). The Parameter outlives the step anyway, so ctx can keep it.
"""
from __future__ import annotations

from typing import Any

from mindspeed_swap.patches.ctx import CtxProxy
from mindspeed_swap.patches.registry import Patch, in_place_of

_WEIGHT = "_mindspeed_swap_weight"


@in_place_of
def _forward(original: Any, ctx: Any, input: Any, weight: Any, *args: Any) -> Any:
    setattr(ctx, _WEIGHT, weight)
    return original(ctx, input, weight, *args)


@in_place_of
def _backward(original: Any, ctx: Any, *grads: Any) -> Any:
    saved_input, _, *rest = ctx.saved_tensors
    return original(CtxProxy(ctx, saved_tensors=(saved_input, getattr(ctx, _WEIGHT), *rest)), *grads)


_LINEAR = "megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication"
PATCHES: list[Patch] = [(f"{_LINEAR}.forward", _forward), (f"{_LINEAR}.backward", _backward)]
