"""What of a model and its optimizer outlives every step."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def owned_by(models: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Parameters and buffers, those that have a storage: sparse ones have none."""
    for model in models:
        yield from model.parameters()
        for _, buffer in model.named_buffers():  # DDP has a list in the place of buffers()
            if buffer.layout is torch.strided:
                yield buffer


def with_gradients(owned: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in owned:
        yield tensor
        for name in ("main_grad", "grad"):
            gradient = getattr(tensor, name, None)
            if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided:
                yield gradient


def has_state(optimizer: Any) -> bool:
    """True if every inner optimizer already has its state: later steps use the same memory again."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    inner = [getattr(part, "optimizer", None) for part in parts]
    return all(bool(getattr(each, "state", None)) for each in inner if each is not None)
