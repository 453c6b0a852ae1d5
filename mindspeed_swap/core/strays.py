"""Strays: saved tensors on the host that no plan fetches, and the order in which backward reads, of a recorded step."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mindspeed_swap.core.saved_tensor import SavedTensor
from mindspeed_swap.core.trace import Key

# Strays are fetched so many reads before backward wants them: about one layer's reads. More would take the room that
# the layers in between need.
LOOK_AHEAD_READS = 16


class Strays:
    """A part of the manager."""

    def __init__(self) -> None:
        self._strays: dict[Key, SavedTensor] = {}
        self._read_order: Mapping[Key, int] = {}
        self._reads: list[Key] = []  # in that order
        self._read_index: dict[Key, int] = {}

    def __bool__(self) -> bool:
        return bool(self._strays)

    def begin(self, read_order: Mapping[Key, int] | None) -> None:
        self._strays.clear()
        if self._read_order is not read_order:
            self._read_order = read_order or {}
            self._reads = sorted(self._read_order, key=self._read_order.__getitem__)
            self._read_index = {key: index for index, key in enumerate(self._reads)}

    def add(self, saved: SavedTensor) -> None:
        self._strays[saved.key] = saved

    def rename(self, saved: SavedTensor, key: Key) -> None:
        if self._strays.pop(saved.key, None):
            self._strays[key] = saved

    def remove(self, saved: SavedTensor) -> None:
        self._strays.pop(saved.key, None)  # another thread may evict, and read, meanwhile

    def wanted_after(self, key: Key) -> Iterator[SavedTensor]:
        """The next ones, now that backward has read ``key``. None before an order is known."""
        now = self._read_index.get(key)
        if now is not None:
            for soon in self._reads[now + 1 : now + 1 + LOOK_AHEAD_READS]:
                if (saved := self._strays.get(soon)) is not None:
                    yield saved

    def last_read_first(self, tensors: Iterable[SavedTensor]) -> list[SavedTensor]:
        """Before an order is known: in the order of saving."""
        order = self._read_order
        return sorted(tensors, key=lambda saved: (-order.get(saved.key, 0), saved.serial))
