"""Names the module calls inside a transformer layer, so that they can be recorded and recomputed.

Every submodule of a layer is one, by its name within the layer; the layer itself is ``layer``. The classes are patched
as their first instances are met, the instances only carry the name: copies and pickles of a model stay what they were.

A router must not run twice: its forward counts tokens and adds to logged losses, so that this would change the result.
Modules around it run again without it, what it returned is kept. Not where they wait for other ranks with other tokens:
of experts that are spread over ranks only what is inside them runs again.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Installed, Patch, in_place_of

NAME, ONCE, _RUNS = "_mindspeed_swap_name", "_mindspeed_swap_once", "_mindspeed_swap_runs"
LAYER = "layer"
_ROUTER = "router"
_ACTIVATION = "mlp.activation_func"

_installed: Installed | None = None
_classes: set[type] = set()


def install_into(installed: Installed) -> None:
    """Where the patches of classes go as they are met."""
    global _installed
    _installed = installed
    _classes.clear()


def name_modules(layer: nn.Module) -> None:
    """Once per layer."""
    if NAME in vars(layer) or _installed is None:
        return
    for name, module in layer.named_modules():
        vars(module)[NAME] = name or LAYER
        vars(module)[ONCE] = _ROUTER in name.split(".") or not all(
            _may_run_again(part) for part in module.modules() if hasattr(part, _ROUTER)
        )
        if name and type(module) not in _classes:
            _classes.add(type(module))
            _installed.wrap(type(module), "forward", _forward)


def _may_run_again(experts: nn.Module) -> bool:
    """A layer of experts, without its router: Megatron's own, with all experts here, and on one stream."""
    config = getattr(experts, "config", None)
    alone = getattr(config, "expert_model_parallel_size", 0) == 1
    overlaps = getattr(config, "moe_shared_expert_overlap", False)
    sources = (type(experts).__module__, type(experts).forward.__module__)
    return alone and not overlaps and all(str(source).startswith("megatron.core.") for source in sources)


def layer_names(models: Iterable[nn.Module]) -> list[dict[int, list[str]]]:
    """Of each model chunk: its layers, counted from 0 over the whole model, and the names of the modules in them."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [
        {
            layer.layer_number - 1: [name for name, _ in layer.named_modules() if name]
            for layer in model.modules()
            if isinstance(layer, TransformerLayer)
        }
        for model in models
    ]


@in_place_of
def _forward(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    own = vars(self)
    if NAME not in own or own.get(_RUNS):  # a forward that calls that of its base class is one call
        return original(self, *args, **kwargs)
    own[_RUNS] = True
    try:
        return runtime.call(own[NAME], original, (self, *args), kwargs, once=own[ONCE])
    finally:
        own[_RUNS] = False


@in_place_of
def _function(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    return runtime.call(_ACTIVATION, original, args, kwargs)


# What the MLP computes between its two products is no module. Its fused forms are functions.
PATCHES: list[Patch] = [
    (f"megatron.core.transformer.mlp.{name}", _function)
    for name in ("bias_gelu_impl", "bias_geglu_impl", "bias_swiglu_impl")
]
