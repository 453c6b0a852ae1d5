"""PyTorch's activation memory budget: each layer compiled, the partitioner told which share of it to keep.

Needs torch.compile of Megatron's layers, so a GPU; the simulated device cannot be compiled for.
"""
from __future__ import annotations

import functools
from typing import Any

from points import Context, Point

SHARES = ("0.5", "0.3", "0.1")


def points(context: Context) -> list[Point]:
    if context.device == "sim":
        return []
    # Compiling takes a minute, in the first steps.
    settings = {"TORCHDYNAMO_DISABLE": "0"}
    plain = Point("compile@1.0", "torch.compile memory budget", (), settings, "compile_budget", "1.0")
    return [plain] + [Point(f"compile@{x}", plain.group, (), settings, "compile_budget", x) for x in SHARES]


def install(setting: str) -> None:
    import torch
    import torch._functorch.config as functorch
    from megatron.core.transformer import transformer_layer

    functorch.activation_memory_budget = float(setting)
    layer = transformer_layer.TransformerLayer
    build = layer.__init__

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.forward = torch.compile(self.forward)

    layer.__init__ = init
