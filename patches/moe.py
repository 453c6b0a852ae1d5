"""Token counts of experts, for which the host waits in every layer, do not queue behind the copies of a plan.

A copy of a few bytes takes its turn on the copy engine after all that have been queued on any stream: the host then
waits for hundreds of megabytes (H200: 5 ms in place of 1). A kernel writes them past the engine.

Layers that run again know them already. So in backward, where the host is ahead of the device, it stays ahead; asking
again it would wait for all that it has queued.
"""
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Installed, in_place_of

_NAME = "maybe_move_tensor_to_cpu"
# What it moves, or makes as it does.
_MOVED = (
    "input_splits", "output_splits", "output_splits_tp", "num_out_tokens", "num_global_tokens_per_local_expert",
    "d2h_event",
)  # fmt: skip
_DISPATCHER, _MOVES = "MoEAlltoAllTokenDispatcher", "_maybe_dtoh_and_synchronize"


@in_place_of
def _maybe_move_tensor_to_cpu(original: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    found = runtime.get().read_small(tensor) if torch.is_tensor(tensor) else None
    if found is None:
        return original(tensor, as_numpy, record_stream)
    if record_stream:
        tensor.record_stream(torch.cuda.current_stream())
    return found.numpy() if as_numpy else found


@in_place_of
def _maybe_dtoh_and_synchronize(original: Any, self: Any, point: str, *args: Any, **kwargs: Any) -> Any:
    """Where it moves the counts it also makes the event that is waited for later: that of the first time is over."""
    if point != getattr(self, "cuda_dtoh_point", None):
        return original(self, point, *args, **kwargs)

    def move() -> tuple[Any, dict[str, Any]]:
        before = dict(vars(self))
        found = original(self, point, *args, **kwargs)
        after = vars(self).items()
        return found, {name: value for name, value in after if name in _MOVED or before.get(name) is not value}

    found, moved = runtime.get().kept(move)
    vars(self).update(moved)
    return found


def install_into(installed: Installed) -> None:
    """Where this Megatron has the functions."""
    utils = import_module("megatron.core.transformer.moe.moe_utils")
    if hasattr(utils, _NAME):
        installed.wrap(utils, _NAME, _maybe_move_tensor_to_cpu)
    dispatchers = import_module("megatron.core.transformer.moe.token_dispatcher")
    if hasattr(dispatcher := getattr(dispatchers, _DISPATCHER, None), _MOVES):
        installed.wrap(dispatcher, _MOVES, _maybe_dtoh_and_synchronize)
