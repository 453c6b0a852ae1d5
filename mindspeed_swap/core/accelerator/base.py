"""The contract between the core and a device. Nothing else in the core names a device type.

A *stream* is an ordered queue of work, an *event* a mark in one. Both are opaque to the core. ``wait`` orders streams
without blocking the host where the device can do that; the simulated device, whose compute runs on the host thread,
blocks instead. Either way the same calls in the same order are right.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size: to look at bits

Stream = Any
Event = Any


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of this process on its device."""

    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int  # what the allocator may use: the device without what others have of it, or less if capped

    @property
    def left_bytes(self) -> int:
        return self.capacity_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True)
class Interval:
    """What the allocator saw since the last call of ``take_interval``."""

    peak_bytes: int
    largest_request_bytes: int


# What is copied: a flat uint8 tensor, or a whole storage. ``len`` is its bytes.
Bytes = torch.Tensor | torch.UntypedStorage


def flat(memory: Bytes) -> torch.Tensor:
    """As a flat uint8 tensor: copies move storages, so that strides never matter."""
    if isinstance(memory, torch.Tensor):
        return memory
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


class Accelerator(ABC):
    """One device of this process."""

    name: str
    # How an optimizer had best use state in host memory: by its kernels where it is, or (False) streamed through the
    # device. None: it depends, and is to be measured.
    kernels_use_host_memory_best: bool | None = None
    # Tensors over host memory come from ``swapped_memory``, not from ``map_host``.
    has_swapped_memory = False

    # ---- whose memory
    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's storage is memory of this device, made by its allocator (not foreign memory)."""

    @abstractmethod
    def memory(self) -> DeviceMemory: ...

    @abstractmethod
    def take_interval(self) -> Interval:
        """Peak and largest request since the previous call; starts the next interval."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device, allocated for the live compute stream.

        Raises torch.OutOfMemoryError, after the pressure handler (if any) could not help.
        """

    def empty_strided(
        self, nbytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Like ``empty``: memory of ``nbytes``, as a tensor of that geometry within it."""
        memory = self.empty(nbytes).untyped_storage()
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)

    @abstractmethod
    def on_pressure(self, handler: Callable[[int, int], bool] | None) -> bool:
        """Ask for ``handler(nbytes, attempt)`` to be called when an allocation fails, from the allocating thread with
        no allocator lock held; True from it means "try again". None removes it.

        Returns False if this device cannot do that: the caller must then evict ahead.
        """

    def leave_room(self, nbytes: int) -> None:
        """What others have taken of the device by now no longer counts as this process's. Of the rest the allocator
        leaves ``nbytes`` free, until this is called again. Where the user has capped it, nothing changes."""

    def take_room(self) -> bool:
        """What ``leave_room`` has the allocator leave is for it after all. False: nothing was left."""
        return False

    def empty_cache(self) -> None:
        """The allocator gives back what it only keeps."""

    # ---- order
    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream on which this thread queues work now. Ask every time: users change it."""

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """A mark behind everything queued on the stream so far. Carries a time for ``elapsed_ms``."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Whatever is queued on the stream from now on starts after the event."""

    @abstractmethod
    def done(self, event: Event) -> bool: ...

    @abstractmethod
    def synchronize(self, event: Event | None = None) -> None:
        """Blocks the host until the event (None: everything on the device) has passed."""

    @abstractmethod
    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Device time between two events. Both must have passed."""

    def occupy(self, ms: float) -> None:
        """Keep the live compute stream busy for about so long. Nothing where there is no way to."""

    # ---- bytes
    @abstractmethod
    def copy(self, dst: Bytes, src: Bytes, stream: Stream) -> None:
        """Queue a copy of equally many bytes, on one side of the device, on the other in registered host memory."""

    def slab_bytes(self, nbytes: int) -> int:
        """The next size, from ``nbytes`` up, in which page-locked memory is to be had without loss."""
        return nbytes

    def page_locked(self, nbytes: int) -> torch.Tensor | None:
        """Flat uint8 in host memory that the device's own runtime has page-locked, freed with the last tensor over it.
        None: the caller maps memory and registers it. ``nbytes`` is one of ``slab_bytes``. Raises RuntimeError if the
        system has no more."""
        return None

    @abstractmethod
    def register_host(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for the copy engines."""

    @abstractmethod
    def unregister_host(self, address: int) -> None: ...

    def map_host(self, host: torch.Tensor) -> torch.Tensor:
        """A flat uint8 tensor that the device's kernels read and write, over registered host memory: ``host``, flat
        uint8. Its storage has exactly these bytes and keeps ``host`` alive; ``owns`` is False for it.

        Raises NotImplementedError where the device has no such tensors.
        """
        raise NotImplementedError(f"{self.name}: no tensors over host memory")

    def read_small(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``tensor.to("cpu", non_blocking=True)`` is, written by a kernel on the current stream: it does not wait
        for the copies that are queued. None where the device has no such way, or not for such a tensor."""
        return None

    def swapped_memory(self, nbytes: int) -> torch.Tensor:
        """Like ``map_host``, where the memory must come from the device's driver: a flat uint8 device tensor over new
        host memory, which ``copy`` takes as host memory. Made once and kept. Raises MemoryError."""
        raise NotImplementedError(f"{self.name}: use map_host")

    def write_mapped(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Like ``dst.copy_(src)``, where ``dst`` is a tensor over host memory (``map_host``, ``swapped_memory``)."""
        dst.copy_(src)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain host tensor with memory of its own, holding the values that the live compute stream has there."""
        return tensor.to("cpu", copy=True)

    def link_limit_bytes_per_ms(self) -> float | None:
        """What the device's link to the host could carry each way. None: not known."""
        return None

    def close(self) -> None:
        """Stop threads and give back what the process holds beyond plain allocations. Idempotent."""
