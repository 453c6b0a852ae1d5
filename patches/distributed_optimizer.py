"""Hands the optimizers over as soon as Megatron has built them: state must be in place before a checkpoint is loaded.

Megatron without apex and Transformer Engine saves with the distributed optimizer but cannot load: it wants every
parameter to have a step before there is state, gives all of them one step tensor, and then overwrites it with the one
from before the load (or stops, in the format ``torch``). All are mended here: state exists from the start,
``load_state_dict`` gives each parameter its own step, and nothing but ``load_state_dict`` sets it.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Patch, in_place_of
from mindspeed_swap.virtual_optimizer.swap_tensor import is_out_of_reach, to_host, write_swapped

# Lists of lists of fp32 main parameters that are copies, not views, of the model's: in the distributed optimizer, and
# in the one without.
_MASTERS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers around a torch optimizer each; none for a rank without parameters."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [part for part in parts if isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer)]


def _masters(part: Any) -> Iterator[torch.Tensor]:
    for name in _MASTERS:
        for group in getattr(part, name, None) or ():
            yield from (master for master in group if master is not None)


@in_place_of
def _get_megatron_optimizer(original: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron.core import parallel_state

    optimizer = original(*args, **kwargs)
    parts = _parts(optimizer)
    running = runtime.get()
    virtual = running.virtual_optimizer(
        parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    )
    virtual.attach([part.optimizer for part in parts], [m for part in parts for m in _masters(part)])
    running.install_overlap(virtual.overlap)
    for part in parts:
        # Megatron's own makes state that is missing, on the device.
        part.init_state_fn = lambda *args: virtual.adopt()
    return optimizer


@in_place_of
def _state_dict(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a rank whose shard of every parameter is empty: it has no step to show, and plain Megatron stops there."""
    inner = getattr(self, "optimizer", None)
    if inner is None or any(group["params"] for group in inner.param_groups):
        return original(self, *args, **kwargs)
    steps = [group["step"] for group in inner.param_groups if "step" in group]
    inner.state["no parameters"] = {"step": torch.tensor(float(steps[0] if steps else 0))}
    try:
        return original(self, *args, **kwargs)
    finally:
        del inner.state["no parameters"]


@in_place_of
def _set_main_param_and_optimizer_states(
    original: Any, self: Any, model_param: Any, tensors: dict[str, Any]
) -> Any:
    given = {**tensors, "step": None}  # None: leave it
    for key, place in _out_of_reach(self, model_param).items():
        if isinstance(given.get(key), torch.Tensor):
            write_swapped(place, given[key])
            given[key] = None
    return original(self, model_param, given)


@in_place_of
def _get_main_param_and_optimizer_states(original: Any, self: Any, model_param: Any) -> Any:
    tensors = original(self, model_param)
    return {key: to_host(value) if is_out_of_reach(value) else value for key, value in tensors.items()}


def _out_of_reach(part: Any, model_param: Any) -> dict[str, torch.Tensor]:
    """What of a parameter's state Megatron cannot copy by itself, on an NPU."""
    group, order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    return {key: value for key, value in state.items() if is_out_of_reach(value)}


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
PATCHES: list[Patch] = [
    ("megatron.core.optimizer.get_megatron_optimizer", _get_megatron_optimizer),
    (f"{_DISTRIBUTED}.state_dict", _state_dict),
    (f"{_DISTRIBUTED}._get_main_param_and_optimizer_states", _get_main_param_and_optimizer_states),
    (f"{_DISTRIBUTED}._set_main_param_and_optimizer_states", _set_main_param_and_optimizer_states),
]
