"""Which saved tensors the manager may move."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from mindspeed_swap.core.accelerator.base import Accelerator

# Below this a copy costs more in launches and latency than it frees: a quarter MiB runs at half the link's speed.
DEFAULT_MIN_BYTES = 64 << 10


# Torch 2.13 no longer has named tensors.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda tensor: False)


class StorageSet:
    """Storages by identity. An address alone proves nothing: it is reused. A storage's Python object lives as long as
    the storage, so a weak reference to it does."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.refs[storage._cdata] = weakref.ref(storage)

    def drop_dead(self) -> None:
        self.refs = {address: ref for address, ref in self.refs.items() if ref() is not None}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        ref = self.refs.get(storage._cdata)
        return ref is not None and ref() is storage


class Movable:
    """Everything else is passed through as it is."""

    def __init__(self, accelerator: Accelerator, min_bytes: int = DEFAULT_MIN_BYTES) -> None:
        self._accelerator = accelerator
        self._min_bytes = max(1, min_bytes)
        self._static = StorageSet()  # of parameters and buffers, which outlive every step
        self._vanishing = StorageSet()

    def keep_on_device(self, tensors: Iterable[torch.Tensor]) -> None:
        """Parameters, gradients, buffers: known by their storage, whatever view of it is saved. Replaces the last."""
        self._static = StorageSet(tensors)

    def will_vanish(self, tensor: torch.Tensor) -> None:
        """The owner of this storage empties it and fills it again later (CheckpointWithoutOutput): never touched."""
        self._vanishing.drop_dead()
        self._vanishing.add(tensor)

    def refuses(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is not ours to move."""
        return self.storage_of(tensor) is None

    def storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Of a tensor that is ours to move; else None."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes:
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or _has_names(tensor):
            return None  # ``set_`` would lose what says so
        base = tensor._base
        # A view that a Function makes of its input says that it is a leaf (Transformer Engine saves such ones).
        owner = tensor if base is None or not base.requires_grad else base
        if owner.is_leaf and owner.requires_grad:
            return None  # its gradient accumulator holds it: dropping our reference would free nothing
        address = storage._cdata  # asked for first: it is there for few
        if address in self._static.refs and storage in self._static:
            return None
        if address in self._vanishing.refs and storage in self._vanishing:
            return None
        return storage if self._accelerator.owns(tensor) else None
