"""The saved tensors that are alive: by storage, by name, and in the order of saving."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from mindspeed_swap.core.accelerator.base import Stream
from mindspeed_swap.core.again import Name
from mindspeed_swap.core.saved_tensor import Dropped, SavedTensor, State
from mindspeed_swap.core.trace import Key


class LiveTensors:
    """A part of the manager, used under its lock; but handles die in any thread, and ``dead`` needs no lock."""

    def __init__(self) -> None:
        self.dead: deque[SavedTensor] = deque()  # once for each handle that died, until the manager acts on it
        self.by_serial: dict[int, SavedTensor] = {}
        self.by_key: dict[Key, SavedTensor] = {}  # of this step
        self._by_storage: dict[tuple[int, int], SavedTensor] = {}
        self._serial = 0

    def find(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> SavedTensor | None:
        """``storage``: of the tensor, if it is at hand."""
        storage = tensor.untyped_storage() if storage is None else storage
        saved = self._by_storage.get((storage._cdata, tensor._version))
        return saved if saved is not None and saved.is_of(storage) and not saved.modified else None

    def dropped(self, name: Name) -> SavedTensor | Dropped | None:
        """As long as it is."""
        saved = self.by_serial.get(name) if isinstance(name, int) else name()
        return saved if saved is not None and saved.state is State.DROPPED else None

    def add(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, stream: Stream,
        alias: torch.Tensor | None = None,
    ) -> SavedTensor:  # fmt: skip
        self._serial += 1
        saved = SavedTensor(tensor, storage, key, self._serial, stream, alias)
        self.by_serial[saved.serial] = self.by_key[key] = self._by_storage[saved.identity] = saved
        return saved

    def rename(self, saved: SavedTensor, key: Key) -> None:
        self.by_key.pop(saved.key, None)
        saved.key, self.by_key[key] = key, saved

    def storage_goes(self, saved: SavedTensor) -> None:
        """Before it gets another one: from now on it is not found."""
        if self._by_storage.get(saved.identity) is saved:
            del self._by_storage[saved.identity]

    def storage_came(self, saved: SavedTensor) -> None:
        self._by_storage[saved.identity] = saved

    def ended(self) -> Iterator[SavedTensor]:
        """Those whose last handle has died since, no longer among these."""
        while self.dead:
            saved = self.dead.popleft()
            saved.handles -= 1
            if saved.handles == 0:
                self._remove(saved)
                yield saved

    def _remove(self, saved: SavedTensor) -> None:
        self.storage_goes(saved)
        del self.by_serial[saved.serial]
        if self.by_key.get(saved.key) is saved:
            del self.by_key[saved.key]
