"""Loose: what autograd saves and no plan moves is passed through, and taken into the books when memory is short.

Where the device waits for the host, a Python object or two per saved tensor is what a step can afford: the books of one
that is held cost ten times that, and nearly none is ever pushed out. So of a loose one only the name is kept, and the
stream that its memory belongs to. What a call that runs again will make is dropped in the same way, and loose then.
"""
from __future__ import annotations

import weakref
from itertools import chain
from typing import TYPE_CHECKING

import torch

from mindspeed_swap.core.again import Call, Identity, Name
from mindspeed_swap.core.saved_tensor import Dropped, Handle, Passed, SavedTensor, State
from mindspeed_swap.core.step import NAMELESS
from mindspeed_swap.core.trace import BACKWARD, Key, Position, new

if TYPE_CHECKING:
    from mindspeed_swap.core.swap_manager import SwapManager


GONE = (State.HOST, State.RETURNING, State.DROPPED)  # what its storage was is not where its bytes are


def _living(name: Name) -> Dropped | None:
    return None if isinstance(name, int) else name()


class Loose:
    """A part of the manager."""

    def __init__(self, manager: SwapManager) -> None:
        self._manager = manager
        self._passed: list[weakref.ref[Passed]] = []  # in the order of saving
        # In this step, what was dropped together, by the storage that it was saved from.
        self._dropped: dict[Identity, list[Name]] = {}

    def begin_step(self) -> None:
        """What outlives its step, as of a retained graph, has no name in the next, and is in the books if it can be."""
        for name in chain.from_iterable(self._dropped.values()):
            if (dropped := _living(name)) is not None and dropped.key is not None:
                dropped.key = dropped.key._replace(ordinal=NAMELESS)
        self._dropped.clear()
        self.take_up()

    def pack(self, tensor: torch.Tensor, key: Key, number: int | None = None) -> Passed | None:
        """``number``: of the save within a call that will run again. None: its storage is in the books already, or is
        to be, as it need not be kept."""
        manager = self._manager
        manager.tidy()
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return Passed(tensor)
        storage = tensor.untyped_storage()
        if self._dropped and (dropped := self.join(tensor, storage, key)):
            return dropped
        if number is not None:
            return self._drop(tensor, storage, key, number)
        if manager.live.find(tensor, storage) is not None or manager.calls.gave(tensor, storage):
            return None
        passed = Passed(tensor)
        passed.key, passed.stream = key, manager.accelerator.compute_stream()
        self._passed.append(weakref.ref(passed))
        return passed

    def _drop(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, number: int) -> Passed | None:
        manager = self._manager
        call = manager.calls.running
        if call is None or manager.live.find(tensor, storage) is not None:
            return None
        if manager.movable.refuses(tensor):
            return Passed(tensor)
        dropped, identity = Dropped(tensor, storage, key, call), (storage._cdata, tensor._version)
        dropped.together = self._dropped[identity] = call.drops(weakref.ref(dropped), identity, number)
        return dropped

    def join(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, anchor: Key | None = None
    ) -> Dropped | None:
        """It is dropped with another one of its storage, if one has been. ``anchor``: as of ``Passed``."""
        other = self._find(tensor, storage)
        if other is None or (call := other.again) is None or self._manager.movable.refuses(tensor):
            return None
        dropped = Dropped(tensor, storage, key, call)
        dropped.anchor, dropped.together = anchor, other.together
        dropped.together.append(weakref.ref(dropped))
        return dropped

    def _find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Dropped | None:
        for name in self._dropped.get((storage._cdata, tensor._version), ()):
            if (dropped := _living(name)) is not None and dropped.storage_ref() is storage and not dropped.modified:
                return dropped
        return None

    def give_back(self, tensor: torch.Tensor, call: Call) -> None:
        """All that the call has dropped of its storage is kept after all."""
        dropped = self._find(tensor, tensor.untyped_storage())
        if dropped is not None and dropped.again is call:
            for name in dropped.together:
                if isinstance(saved := self._manager.live.dropped(name), Dropped):
                    self._manager.give(saved, tensor)

    def give(self, dropped: Dropped, made: torch.Tensor) -> None:
        """It was made again. With the manager's lock held."""
        if dropped.again is not None:
            dropped.give(made, self._manager.accelerator.compute_stream())
            self._passed.append(weakref.ref(dropped))

    def unpack(self, packed: Passed) -> torch.Tensor:
        """What was passed through, loose or not."""
        manager = self._manager
        manager.tidy()
        if (anchor := packed.anchor) is not None:
            packed.anchor = None
            manager.act(new(Position, (BACKWARD, *anchor)))  # what is released makes room for a call that runs again
        if isinstance(packed, Dropped) and (call := packed.again) is not None:
            packed.check()
            manager.calls.run_again(call, packed)
            assert packed.again is None, "a call that ran again has not given all that it had dropped"
        with manager.lock:  # else its memory could be given up while an alias of it is made
            tensor = packed.get()
        if tensor is None:
            assert packed.handle is not None
            return manager.unpack(packed.handle)
        if packed.key is not None and not packed.read:
            packed.read = True
            manager.look_ahead(packed.key)
        return tensor

    def take_up(self) -> int:
        """All that are still there, so that they can be pushed out. With the manager's lock held. Returns the bytes
        that this alone has freed: of those whose storage was pushed out under another name."""
        refs, freed = self._passed[:], 0
        del self._passed[: len(refs)]  # other threads append meanwhile
        for ref in refs:
            if (passed := ref()) is not None and (saved := self._take_up(passed)) is not None:
                freed += saved.nbytes if saved.state in GONE and not saved.held_elsewhere() else 0
        return freed

    def _take_up(self, passed: Passed) -> SavedTensor | None:
        manager, tensor, key = self._manager, passed.tensor, passed.key
        if tensor is None or key is None or passed.modified:
            return None  # changed in place: then nothing may ever read it
        storage = manager.movable.storage_of(tensor)
        if storage is None:
            return None
        saved = manager.live.find(tensor, storage)
        whole = saved is None
        if saved is None:
            saved = manager.enter(tensor, storage, key, passed.stream, tensor)
        saved.handles += 1
        passed.handle = Handle(saved, tensor, key, manager.live.dead, whole=whole)
        passed.handle.read, passed.tensor = passed.read, None
        return saved
