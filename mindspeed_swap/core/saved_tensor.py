"""SavedTensor: one storage that autograd saved, its views, and where its bytes are.

Note: [The alias keeps the version counter]
A SavedTensor holds one detached alias of the first tensor saved from the storage, never that tensor itself: a saved
output held as itself would be a reference cycle through its own graph. The alias shares the original's version counter,
and keeps sharing it when its data is replaced. So the alias serves three ends: it holds the device memory while it
should be held; emptied, it still tells whether the original was changed in place (PyTorch's own check is off while
saved-tensor hooks are active); refilled, views made from it count in-place changes made during backward.
"""
from __future__ import annotations

import weakref
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Stream
from mindspeed_swap.core.host_pool import HostBlock
from mindspeed_swap.core.trace import Key, Position

if TYPE_CHECKING:
    from mindspeed_swap.core.again import Call, Name


class State(Enum):
    """Where the bytes are. The device copy is the truth in DEVICE, LEAVING; the host copy in HOST, RETURNING."""

    DEVICE = "device"
    LEAVING = "leaving"  # device memory still held, copy to the host queued
    HOST = "host"  # device memory given up
    RETURNING = "returning"  # buffer allocated, copy to the device queued
    DROPPED = "dropped"  # nowhere: the call that made it runs again when it is wanted, see again.py
    DEAD = "dead"  # no handle left

    # By identity, in C: Enum's own hashes the name in Python, a dozen times per moved tensor.
    __hash__ = object.__hash__


_ALLOWED = {
    State.DEVICE: {State.LEAVING, State.DROPPED, State.DEAD},
    State.LEAVING: {State.HOST, State.DEVICE, State.DEAD},
    State.HOST: {State.RETURNING, State.DEAD},
    State.RETURNING: {State.DEVICE, State.HOST, State.DEAD},
    State.DROPPED: {State.DEVICE, State.DEAD},
    State.DEAD: set(),
}

Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # dtype, shape, stride, offset

_NOTHING: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def over(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """What has this geometry in that memory."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return over(storage, geometry)
    dtype, shape, stride, offset = geometry
    return _nothing(dtype, storage.device).detach().set_(storage, offset, shape, stride)


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor to point an alias at while its bytes are elsewhere. An alias of it costs less than a new one."""
    empty = _NOTHING.get((dtype, device))
    if empty is None:
        with torch.inference_mode(False):  # evaluation under pressure: an inference tensor would spoil the alias
            empty = _NOTHING[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return empty


def can_be_emptied(tensor: torch.Tensor) -> bool:
    """An alias of it can be: it is no subclass, and nothing special."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta")


def _empty(alias: torch.Tensor) -> torch.Tensor:
    """It gives its bytes up and keeps the version counter: see Note [The alias keeps the version counter]."""
    alias.data = _nothing(alias.dtype, alias.device)
    return alias


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """An alias without its bytes: it tells the version."""
    return _empty(tensor.detach())


class SavedTensor:
    """One storage at one version. Every view of it that autograd saves shares this object (and its one copy)."""

    __slots__ = (
        "again",
        "alias",
        "block",
        "buffer",
        "copied",
        "emptied",
        "handles",
        "identity",
        "key",
        "loaded",
        "nbytes",
        "release",
        "serial",
        "state",
        "storage_ref",
        "stream",
        "version",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, serial: int, stream: Stream,
        alias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """``alias``: of the tensor, if there is one. (Inside an operator, where memory is short, ``detach`` makes one
        with a version counter of its own.)"""
        self.key = key
        self.serial = serial  # order of saving, across steps
        self.nbytes: int = storage.nbytes()
        self.version: int = tensor._version
        self.alias = tensor.detach() if alias is None else alias
        self.emptied: Geometry | None = None  # of the alias, from when it is emptied for the first time: most never are
        # The storage's Python object lives as long as the storage, so a weak reference proves identity even after the
        # address was reused; addresses alone prove nothing.
        self.storage_ref = weakref.ref(storage)
        self.identity = (storage._cdata, self.version)
        self.state = State.DEVICE
        self.stream = stream  # that the device memory belongs to, see mover.py
        self.handles = 0
        self.again: Call | None = None  # while DROPPED: what makes it again
        self.block: HostBlock | None = None  # where the host copy is
        self.copied: Any = None  # event: device -> host done
        self.buffer: torch.Tensor | None = None  # what the alias will be, while RETURNING
        self.loaded: Any = None  # event: host -> device done
        self.release: Position | None = None  # where the plan gives its device memory up

    def move(self, state: State) -> None:
        if state not in _ALLOWED[self.state]:
            raise AssertionError(f"saved tensor {self.key}: {self.state.value} -> {state.value} is not a transition")
        self.state = state

    @property
    def modified(self) -> bool:
        """Changed in place since it was saved."""
        return self.alias._version != self.version

    @property
    def geometry(self) -> Geometry:
        """Of the alias, as long as it has its bytes."""
        if self.emptied is not None:
            return self.emptied
        return geometry_of(self.alias)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        return self.storage_ref() is storage

    def held_elsewhere(self) -> bool:
        """After ``drop_device``: somebody else still holds the storage, so no memory was freed."""
        return self.storage_ref() is not None

    def drop_device(self) -> None:
        """Give the device memory up: the alias keeps the version counter and nothing else."""
        self.emptied = self.geometry
        _empty(self.alias)

    def new_buffer(self, accelerator: Accelerator) -> torch.Tensor:
        """To come back to. Raises torch.OutOfMemoryError."""
        return accelerator.empty_strided(self.nbytes, *self.geometry)

    def adopt(self, buffer: torch.Tensor) -> None:
        """The bytes are back, in a new storage: from now on that is the truth. ``buffer``: of our own geometry."""
        self.alias.data = buffer
        storage = buffer.untyped_storage()
        self.storage_ref = weakref.ref(storage)
        self.identity = (storage._cdata, self.version)

    def view(self, handle: Handle) -> torch.Tensor:
        # Detached first: with create_graph an in-place change of what we return has an autograd history of its own,
        # which must not become the alias's. The version counter is shared all the way.
        alias = self.alias.detach()
        if handle.whole:
            return alias
        if handle.dtype != alias.dtype:
            # Through bytes: any two types have them in common. What does not fill an element cannot be viewed as one.
            alias = alias.as_strided((self.nbytes // alias.dtype.itemsize,), (1,), 0).view(torch.uint8)
            alias = alias[: alias.numel() // handle.dtype.itemsize * handle.dtype.itemsize].view(handle.dtype)
        return alias.as_strided(handle.shape, handle.stride, handle.offset)


class Handle:
    """What autograd keeps instead of the tensor: the geometry of one view.

    Its end is the end of the save. The finaliser may run anywhere, inside a lock or a garbage collection, so all it
    does is to append to a deque that the manager drains at its next event.
    """

    __slots__ = ("_dead", "dtype", "key", "offset", "read", "saved", "shape", "stride", "whole")

    def __init__(
        self, saved: SavedTensor, tensor: torch.Tensor, key: Key, dead: deque[SavedTensor], *, whole: bool
    ) -> None:
        self.saved = saved
        self.key = key  # of this save; the SavedTensor has the key of its first
        self.read = False
        self.whole = whole  # the very view that the SavedTensor was made from; else it has a geometry of its own
        self._dead = dead
        if not whole:
            self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
            self.dtype = tensor.dtype

    def __del__(self) -> None:
        self._dead.append(self.saved)


class Passed:
    """A tensor that is not ours to move, with the version check that hooks switch off.

    Holds a detached alias (a leaf Parameter itself: some backward functions need its attributes). Of a loose one,
    see loose.py, until it is taken up.
    """

    __slots__ = ("__weakref__", "anchor", "handle", "key", "read", "stream", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, anchor: Key | None = None) -> None:
        """``anchor``: name of the save, where the plan wants something done when it is read."""
        self.version: int = tensor._version
        self.anchor = anchor
        # Of a loose one (loose.py): its name, whose memory it is, whether it was read, what is read if it was taken up.
        self.key: Key | None = None
        self.read = False
        self.stream: Stream = None
        self.handle: Handle | None = None
        self.tensor: torch.Tensor | None
        self.tensor = tensor if tensor.is_leaf and isinstance(tensor, torch.nn.Parameter) else tensor.detach()

    @property
    def modified(self) -> bool:
        """Changed in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self.version

    def get(self) -> torch.Tensor | None:
        """None: it was taken up, see ``handle``."""
        tensor = self.tensor
        if tensor is None:
            return None
        if tensor._version != self.version:
            raise modified_in_place(tensor, None if tensor.is_nested else tensor.shape, self.version)
        return tensor if self.key is None else tensor.detach()  # as SavedTensor.view


class Dropped(Passed):
    """What a call that runs again makes once more: until then a name, and an alias that keeps the version counter (see
    Note [The alias keeps the version counter]). From then on a loose one."""

    __slots__ = ("again", "geometry", "nbytes", "storage_ref", "together")

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: Key, again: Call) -> None:
        super().__init__(tensor)
        self.key = key
        self.again: Call | None = again  # as long as it is dropped
        self.together: list[Name] = []  # all that are made together with it
        self.nbytes: int = storage.nbytes()
        self.storage_ref = weakref.ref(storage)  # that it was saved from
        self.geometry = geometry_of(tensor)
        assert self.tensor is not None
        _empty(self.tensor)

    @property
    def state(self) -> State:
        return State.DEVICE if self.again is None else State.DROPPED

    def check(self) -> None:
        """Raises RuntimeError if it is."""
        if self.modified:
            assert self.tensor is not None
            raise modified_in_place(self.tensor, self.geometry[1], self.version)

    def give(self, made: torch.Tensor, stream: Stream) -> None:
        """Made again, in memory that belongs to ``stream``."""
        assert self.tensor is not None
        self.again, self.stream = None, stream
        alike = geometry_of(made) == self.geometry  # nearly always
        self.tensor.data = made if alike else over(made.untyped_storage(), self.geometry)


def modified_in_place(tensor: torch.Tensor, shape: torch.Size | None, expected: int) -> RuntimeError:
    """PyTorch's own error for a saved tensor that was changed before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape) if shape is not None else 'nested'}] is at version {tensor._version}; expected "
        f"version {expected} instead. Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )
