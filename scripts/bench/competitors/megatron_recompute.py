"""Megatron's own recompute: every layer, or parts of each."""
from __future__ import annotations

from points import FULL, Context, Point

# Without Transformer Engine plain Megatron dies of a NameError when it recomputes norms (0.19.2), so that part is
# tried where its layers are TE's.
_SELECTIVE = ("core_attn", "mlp", "core_attn mlp")
_SELECTIVE_TE = ("layernorm", "layernorm mlp")
_SELECTIVE_MOE = ("core_attn", "moe")


def points(context: Context) -> list[Point]:
    modules = _SELECTIVE_MOE if "--num-experts" in context.workload.flags else _SELECTIVE
    if context.workload.settings.get("IMPL"):
        modules += _SELECTIVE_TE
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    found = [Point(FULL, "megatron full recompute", full)]
    for names in modules:
        flags = ("--recompute-granularity", "selective", "--recompute-modules", *names.split())
        found.append(Point(f"selective@{names.replace(' ', '+')}", "megatron selective recompute", flags))
    return found
