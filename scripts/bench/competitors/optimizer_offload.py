"""Megatron's optimizer in host memory, stepped by the CPU: in full, in half, and overlapped with its copies."""
from __future__ import annotations

from points import Context, Point

_ON = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")


def points(context: Context) -> list[Point]:
    if "optimizer" not in context.workload.features:
        return []
    found = []
    for fraction in ("1.0", "0.5"):
        for name, more in (("", ()), ("@overlap", ("--overlap-cpu-optimizer-d2h-h2d",))):
            flags = (*_ON, "--optimizer-offload-fraction", fraction, *more)
            found.append(Point(f"optimizer_cpu@{fraction}{name}", "megatron optimizer offload", flags))
    return found
