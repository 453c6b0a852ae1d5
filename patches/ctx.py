"""A stand-in for the ctx of an autograd Function, for Functions of Megatron's that must save or read differently."""
from __future__ import annotations

from typing import Any


class CtxProxy:
    """Passes everything on to the ctx, both ways; only what is read by the names of ``instead`` is that."""

    def __init__(self, ctx: Any, **instead: Any) -> None:
        vars(self).update(instead, _ctx=ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_ctx"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_ctx"], name, value)
