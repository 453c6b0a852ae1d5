"""Megatron's fine-grained activation offload. Three gates keep it from local layers, which it needs in nothing; they
are lifted, and nothing else is changed: the demand for Transformer Engine (a check of arguments, an import of a flag),
and the binding to CPU cores, which needs a library that may be missing.
"""
from __future__ import annotations

import functools
import os
import types
from typing import Any

from points import Context, Point

# Swept: each one's best counts. attn_proj needs core_attn.
MODULES = (
    "core_attn attn_proj",
    "attn_norm qkv_linear core_attn attn_proj mlp_norm",
    "core_attn",
    "qkv_linear core_attn attn_proj",
)
MOE_MODULES = ("expert_fc1 moe_act", "core_attn attn_proj expert_fc1 moe_act")
HALF = "0.5"  # of the groups


def points(context: Context) -> list[Point]:
    experts = "--num-experts" in context.workload.flags
    modules = MODULES + (MOE_MODULES if experts else ())
    found = [_point(context, names) for names in modules]
    # Beside them, recompute of what they do not offload.
    found += [_point(context, names, "1.0", "moe" if experts else "mlp") for names in modules[:2]]
    return found + [_point(context, names, HALF) for names in modules[:2]]


def _point(context: Context, names: str, fraction: str = "1.0", recomputed: str = "") -> Point:
    flags = ("--fine-grained-activation-offloading", "--offload-modules", *names.split())
    flags += ("--activation-offload-fraction", fraction)
    if context.device == "sim":  # everything is small there
        flags += ("--min-offloaded-tensor-size", "1024")
    name = f"fine_grained@{names.replace(' ', '+')}" + (f"@{fraction}" if fraction != "1.0" else "")
    if recomputed:
        flags += ("--recompute-granularity", "selective", "--recompute-modules", recomputed)
        name += f"@recompute-{recomputed}"
    group, settings = "megatron fine-grained offload", {"NVTE_CPU_OFFLOAD_V1": "1"}
    return Point(name, group, flags, settings, plugin="megatron_offload")


def install(setting: str) -> None:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
    from megatron.core.pipeline_parallel import utils
    from megatron.training import arguments

    if getattr(te, "cpu_offload", None) is None:
        te.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    utils.set_ideal_affinity_for_current_gpu = lambda: None
    original = arguments.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        args.fine_grained_activation_offloading = False
        result = original(args, *rest, **kwargs)
        args.fine_grained_activation_offloading = True
        return result

    arguments.validate_args = validate_args
    if os.environ.get("MINDSPEED_SWAP_DEVICE") == "sim":
        _simulated(offload)


def _simulated(offload: Any) -> None:
    """Tensors of the simulated device say that they are on the CPU."""
    import torch

    from mindspeed_swap.sim import device

    handler = offload.ChunkOffloadHandler
    move = handler.offload

    def mine(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter) and device.extension().owns(tensor)

    def out(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _, copy, pooled = move(self, tensor, *args, **kwargs)
        return torch.device("cuda", 0), copy, pooled

    handler._can_manage_tensor_for_offload = staticmethod(mine)
    handler.offload = out
