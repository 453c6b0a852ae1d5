"""Slab: one piece of page-locked host memory, and what of it is free."""
from __future__ import annotations

import ctypes
import errno
import mmap

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event
from mindspeed_swap.units import format_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet in Python's mmap module
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Slab:
    """One mapping: touched, kept from forked children, registered. ``tensor`` keeps it mapped, so it is unmapped when
    the last view of it dies and never under a user."""

    def __init__(self, nbytes: int, accelerator: Accelerator) -> None:
        self.nbytes = nbytes
        self.free: dict[int, tuple[int, int]] = {}  # start of a free region -> its end, its serial number
        self.free_ends: dict[int, int] = {}  # end of a free region -> its start
        # Freed ranges that copies may still use, (start, end, events), in order, without overlap, only in free regions.
        self.marks: list[tuple[int, int, tuple[Event, ...]]] = []
        locked = accelerator.page_locked(nbytes)
        self.tensor = self._map(accelerator) if locked is None else locked
        self.address = self.tensor.data_ptr()

    def _map(self, accelerator: Accelerator) -> torch.Tensor:
        # An inference tensor could not be written to outside inference mode.
        with torch.inference_mode(False):
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = tensor.data_ptr()
        # Fewer pages to fault in and to pin: 3 times faster where huge pages are to be had; harmless where not.
        self._advise(getattr(mmap, "MADV_HUGEPAGE", 14))
        # Page-locked pages and copy-on-write do not go together: the copy engine would keep writing to the old page.
        # Checkpoint writers and data loaders fork; they have no business in here.
        self._advise(getattr(mmap, "MADV_DONTFORK", 10))
        # Touching is done by the allocating thread: under the kernel's default policy pages come from the NUMA node of
        # the core that touches them, and a rank is bound (or at least closest) to the node of its device. ctypes
        # releases the GIL meanwhile.
        if not self._advise(_MADV_POPULATE_WRITE):
            if ctypes.get_errno() == errno.ENOMEM:  # writing to it would end the process
                raise MemoryError(f"no host memory for {format_bytes(self.nbytes)}")
            ctypes.memset(self.address, 0, self.nbytes)
        accelerator.register_host(self.address, self.nbytes)
        return tensor

    def _advise(self, advice: int) -> bool:
        return bool(_libc.madvise(self.address, self.nbytes, advice) == 0)
