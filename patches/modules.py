"""Names the module calls inside a transformer layer, so that they can be recorded and recomputed.

Every submodule of a layer is one, by its name within the layer; the layer itself is ``layer``. The classes are patched
as their first instances are met, the instances only carry the name: copies and pickles of a model stay what they were.

A module that holds a router is none: the router's forward counts tokens and adds to logged losses, so that running it
again would change the result. What is inside such a module, experts above all, is.
"""
from __future__ import annotations

import functools
from typing import Any

from torch import nn

from mindspeed_swap import runtime
from mindspeed_swap.patches.registry import Installed, Patch

NAME = "_mindspeed_swap_name"
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
        if any(part.split(".")[-1] == _ROUTER for part, _ in module.named_modules()) or _ROUTER in name.split("."):
            continue
        vars(module)[NAME] = name or LAYER
        if name and type(module) not in _classes:
            _classes.add(type(module))
            _installed.wrap(type(module), "forward", _forward)
    vars(layer).setdefault(NAME, "")


def _forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = vars(self).get(NAME)
        if not name:
            return original(self, *args, **kwargs)
        return runtime.call(name, original, (self, *args), kwargs)

    return forward


def _function(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return runtime.call(_ACTIVATION, original, args, kwargs)

    return function


# What the MLP computes between its two products is no module. Its fused forms are functions.
PATCHES: list[Patch] = [
    (f"megatron.core.transformer.mlp.{name}", _function)
    for name in ("bias_gelu_impl", "bias_geglu_impl", "bias_swiglu_impl")
]
