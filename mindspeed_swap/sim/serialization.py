"""Storages, torch.save, torch.load and DataLoader: what comes from a file or dataset is host memory unless asked."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data._utils import fetch as data_fetch

from mindspeed_swap.sim import current
from mindspeed_swap.sim.device import device_memory, host_memory, is_device
from mindspeed_swap.sim.patching import replace
from mindspeed_swap.sim.placement import DEVICE, place_named

_real_clone = torch.UntypedStorage.clone
_BEFORE_TORCH = 5  # torch's own CPU handler, which would claim every storage, has priority 10


def redirect() -> None:
    """Register the device as a location of saved storages; patch torch.load and the in-process dataset fetchers."""
    torch.serialization.register_package(_BEFORE_TORCH, _location_of, _restore)
    replace(torch.UntypedStorage, clone=_clone)
    load = _reading(torch.load)
    replace(torch, load=load)
    replace(torch.serialization, load=load)
    for fetcher in (data_fetch._MapDatasetFetcher, data_fetch._IterableDatasetFetcher):
        # A dataset computes on host tensors, whose results would count as device memory; a forked worker has no device.
        replace(fetcher, fetch=_reading(fetcher.fetch))


def _reading(function: Any) -> Any:
    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        with host_memory():
            return function(*args, **kwargs)

    return read


def _view(storage: Any) -> torch.Tensor:
    with host_memory():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _location_of(storage: Any) -> str | None:
    """What torch.save notes: "cuda:0" for a storage of the device. None leaves it to torch."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return None
    untyped = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
    return str(current.device()) if is_device(_view(untyped)) else None


def _restore(storage: Any, location: str) -> Any:
    """torch.load has read the bytes into host memory and wants them at the location."""
    if place_named(location) is not DEVICE or storage.device.type != "cpu":
        return None
    with device_memory():
        return _copy(storage)


def _copy(storage: Any) -> torch.UntypedStorage:
    """In memory of the caller's scope. UntypedStorage(n) asks torch's default allocator, so gives host memory."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda").untyped_storage().copy_(storage)


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """UntypedStorage.clone, which copy.deepcopy of a tensor calls: stays where it is."""
    if self.device.type != "cpu":
        return _real_clone(self)
    with device_memory() if is_device(_view(self)) else host_memory():
        return _copy(self)
