"""Which saved tensors the manager may move."""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator

# Below this a copy costs more in launches and latency than it frees: a quarter MiB runs at half the link's speed.
DEFAULT_MIN_BYTES = 64 << 10


class Movable:
    """Everything else is passed through as it is."""

    def __init__(self, accelerator: Accelerator, min_bytes: int = DEFAULT_MIN_BYTES) -> None:
        self._accelerator = accelerator
        self._min_bytes = min_bytes
        self._static: set[int] = set()  # storages of parameters and buffers, which outlive every step
        self._vanishing: dict[int, weakref.ref[Any]] = {}

    def keep_on_device(self, tensors: Iterable[torch.Tensor]) -> None:
        """Parameters, gradients, buffers: known by their storage, whatever view of it is saved. Replaces the last."""
        self._static = {tensor.untyped_storage()._cdata for tensor in tensors}

    def will_vanish(self, tensor: torch.Tensor) -> None:
        """The owner of this storage empties it and fills it again later (CheckpointWithoutOutput): never touched."""
        self._vanishing = {address: ref for address, ref in self._vanishing.items() if ref() is not None}
        storage = tensor.untyped_storage()
        self._vanishing[storage._cdata] = weakref.ref(storage)

    def refuses(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is not ours to move."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return True  # ``set_`` would lose the bit that says so
        if tensor.is_leaf and tensor.requires_grad:
            return True  # its gradient accumulator holds it: dropping our reference would free nothing
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or storage._cdata in self._static:
            return True
        vanishing = self._vanishing.get(storage._cdata)
        if vanishing is not None and vanishing() is storage:
            return True
        return not self._accelerator.owns(tensor)
