"""A stand-in for the ctx of an autograd Function, for Functions of Megatron's that must save or read differently."""
from __future__ import annotations

from typing import Any


class CtxProxy:
    """Passes everything on to the ctx, both ways. Subclasses change single names."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_ctx"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)
