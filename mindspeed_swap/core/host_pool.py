"""HostPool: page-locked host memory for swapped bytes, under one budget.

Slabs are ours (mmap, touch, register) because a framework's pinned allocator rounds to powers of two and is several
times slower. Blocks are cut out of slabs by best fit; free neighbours coalesce. A freed region can be handed out again
at once although a copy may still be reading it: the block then names the events to wait for (``HostBlock.pending``), so
reuse is ordered on the caller's copy stream and the host never blocks.
"""
from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event
from mindspeed_swap.core.host_slab import Slab
from mindspeed_swap.log import say
from mindspeed_swap.units import MIB, format_bytes

# Copy engines reach full rate on lines of 256-512 bytes, and every view a tensor can want (16-byte vector loads
# included) stays aligned.
ALIGNMENT = 512
# Big enough that registering (a system call and a driver call, tens of microseconds besides its cost per page) does
# not count, small enough that the last, half-used slab does not either.
SLAB_BYTES = 64 * MIB
# A budget must hold several slabs, or one request of an awkward size would take all of it.
SLABS_PER_BUDGET = 8
# A request of at least a common slab's 1/8 that finds no room gets a slab of its own size: such requests would leave
# tails in common slabs that nothing fits into (64 MiB hold one tensor of 40 MiB). For smaller ones tails are small.
OWN_SLAB_SHARE = 8

# A freed block answers a request that is smaller by up to this part of it: what an expert saves differs from step to
# step, and to cut a block anew takes the host as long as a whole copy does.
LOOSE_PARTS = 16
# What all that are out take beyond what was asked for: up to this part of the budget. Plans leave twice as much.
SLACK_PARTS = 40

# Slabs of a forked child: never unmapped there, see HostPool.close.
_forked: list[object] = []


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class HostBlock:
    """``nbytes`` of registered host memory. ``pending``: the caller's copy stream waits for these events before it
    writes to the memory."""

    __slots__ = ("_size", "_slab", "_start", "_tensor", "nbytes", "pending")

    def __init__(
        self, slab: Slab, start: int, tensor: torch.Tensor, nbytes: int, pending: tuple[Event, ...], size: int
    ) -> None:
        """``size``: the bytes that it takes, at least ``nbytes``."""
        self._slab: Slab | None = slab
        self._start, self._size = start, size
        self._tensor: torch.Tensor | None = tensor
        self.nbytes = nbytes
        self.pending = pending

    @property
    def tensor(self) -> torch.Tensor:
        """Flat uint8 view of exactly ``nbytes``. Raises RuntimeError once the block has been freed."""
        if self._tensor is None:
            raise RuntimeError("host block used after it was freed")
        return self._tensor


_Freed = tuple[Slab, int, torch.Tensor, tuple[Event, ...]]  # where it starts, its bytes, what may still use them


def _unregister(accelerator: Accelerator, slabs: list[Slab], pid: int) -> None:
    """Raises the first failure, after all of them."""
    if os.getpid() != pid:
        # In a forked child the memory is not mapped (MADV_DONTFORK) and what the child has since mapped in its place
        # must not be unmapped; the registration is the parent's.
        _forked.extend(slabs)
        return
    undo: list[Callable[[], None]] = [accelerator.synchronize] if slabs else []
    undo += [functools.partial(accelerator.unregister_host, slab.address) for slab in slabs]
    failure: Exception | None = None
    for action in undo:
        try:
            action()
        except Exception as error:
            failure = failure or error
    slabs.clear()
    if failure is not None:
        raise failure


class HostPool:
    """Sub-allocates registered slabs up to ``budget_bytes``. Thread-safe. Ends with ``close``.

    Must not be called from finalisers: a garbage collection inside a call would deadlock. (The swap manager's
    finalisers only append to a queue.)
    """

    def __init__(self, accelerator: Accelerator, budget_bytes: int) -> None:
        self._accelerator = accelerator
        self._budget = max(0, budget_bytes)
        small = _round_up(self._budget // SLABS_PER_BUDGET, mmap.PAGESIZE)
        self._slab_bytes = accelerator.slab_bytes(min(SLAB_BYTES, small))
        self._lock = threading.Lock()
        self._slabs: list[Slab] = []
        # Every free region as (bytes, serial, slab, start), sorted: the first one large enough is the best fit, and
        # among equals the one freed longest ago, whose copies are the most likely to be over.
        self._regions: list[tuple[int, int, Slab, int]] = []
        # Freed blocks by their bytes, oldest first: steps repeat, so the next request is nearly always for one of
        # these, or nearly one. The first one that is not makes regions of all of them.
        self._freed: dict[int, deque[_Freed]] = {}
        self._sizes: list[int] = []  # of these, sorted
        self._serial = 0
        self._pinned = self._used = self._peak_used = self._allocations = self._slack = 0
        self._closed = False
        # A pool that is dropped without ``close``: what the system maps next at these addresses could not be
        # registered. (At the interpreter's end the driver may be gone already.)
        self._at_death = weakref.finalize(self, _unregister, accelerator, self._slabs, os.getpid())
        self._at_death.atexit = False

    # ---- figures
    @property
    def budget_bytes(self) -> int:
        """What may be pinned. Falls to what is pinned when the system refuses to give more."""
        return self._budget

    @property
    def pinned_bytes(self) -> int:
        return self._pinned

    @property
    def used_bytes(self) -> int:
        """Bytes asked for by the blocks that are out."""
        return self._used

    @property
    def peak_used_bytes(self) -> int:
        return self._peak_used

    @property
    def slab_count(self) -> int:
        return len(self._slabs)

    @property
    def allocations(self) -> int:
        """Slabs ever allocated; no longer rising once the pool fits the step."""
        return self._allocations

    # ---- blocks
    def alloc(self, nbytes: int) -> HostBlock | None:
        """A block of ``nbytes``, or None if the budget (or the system) does not allow it. Pins more memory only if no
        free region fits. Raises ValueError for ``nbytes`` < 1, RuntimeError on a closed pool."""
        if nbytes < 1:
            raise ValueError(f"a host block of {nbytes} bytes")
        with self._lock:
            self._check_open()
            block = self._again(nbytes)
            if block is None:
                self._settle()
                block = self._cut(nbytes)
            if block is None:
                return None
            self._used += nbytes
            if self._used > self._peak_used:
                self._peak_used = self._used
            return block

    def free(self, block: HostBlock, after: Event | None = None) -> None:
        """Give a block back. Its memory may be handed out at once, to be overwritten after ``after`` (None: nothing
        reads or writes it any more). Raises RuntimeError if it has been freed already."""
        with self._lock:
            slab, start = block._slab, block._start
            if slab is None:
                raise RuntimeError("host block freed twice")
            # Its own pending events stay: the caller may never have waited for them.
            events = block.pending if after is None else (*block.pending, after)
            tensor, size = block.tensor, block._size
            block._slab, block._tensor, block.pending = None, None, ()
            self._used -= block.nbytes
            self._slack -= size - block.nbytes
            if self._closed:
                return
            same = self._freed.get(size)
            if same is None:
                same = self._freed[size] = deque()
                insort(self._sizes, size)
            same.append((slab, start, tensor, events))

    def reserve(self, nbytes: int, blocks: Iterable[int] = ()) -> bool:
        """Pin up to ``nbytes`` in all, in one go, so that a step that uses no more than that need not pin any.

        ``blocks``: the bytes of its blocks, in their order. Then it is what the first ``nbytes`` of them need that do
        not fit into what is free: a tail of a slab is of no use to a larger block. Returns False, having done nothing,
        if the budget (or the system) does not allow it."""
        with self._lock:
            self._check_open()
            if blocks:
                self._settle()
                missing = self._lacking(blocks, nbytes - self._used)
            else:
                missing = max(0, nbytes - self._pinned)
            missing = self._accelerator.slab_bytes(_round_up(missing, mmap.PAGESIZE))
            if missing == 0:
                return True
            return self._pinned + missing <= self._budget and self._add_slab(missing)

    def charge(self, nbytes: int) -> bool:
        """Take memory that somebody else allocates, for good, out of the budget. False: there is not as much left."""
        with self._lock:
            self._check_open()
            if self._pinned + nbytes > self._budget:
                return False
            self._budget -= nbytes
            return True

    def close(self) -> None:
        """Unregister all and unmap what is not in use. Blocks that are out keep their memory mapped, no longer
        page-locked, until they die. Waits for the device first. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._regions, self._pinned = [], 0
            self._freed.clear()
            self._sizes.clear()
            self._at_death()

    # ---- regions (all below: lock held)
    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the host pool has been closed")

    def _again(self, nbytes: int) -> HostBlock | None:
        """A freed block of about that size."""
        for size in islice(self._sizes, bisect_left(self._sizes, nbytes), None):
            spare = size - nbytes
            if spare and spare > min(size // LOOSE_PARTS, self._budget // SLACK_PARTS - self._slack):
                break
            if freed := self._freed[size]:
                slab, start, tensor, events = freed.popleft()
                if tensor.numel() != nbytes:
                    tensor = slab.tensor[start : start + nbytes]
                self._slack += spare
                return HostBlock(slab, start, tensor, nbytes, self._undone(events), size)
        return None

    def _cut(self, nbytes: int) -> HostBlock | None:
        """Out of the best fit."""
        size = _round_up(nbytes, ALIGNMENT)
        at = bisect_left(self._regions, (size,))
        if at == len(self._regions):
            if not self._grow(size):
                return None
            at = bisect_left(self._regions, (size,))
        _, _, slab, start = self._regions[at]
        end = self._take_region(slab, start)
        if start + size < end:
            self._add_region(slab, start + size, end)
        pending = self._take_marks(slab, start, start + size)
        return HostBlock(slab, start, slab.tensor[start : start + nbytes], nbytes, pending, nbytes)

    def _lacking(self, blocks: Iterable[int], most_bytes: int) -> int:
        """Of these blocks, up to ``most_bytes``, the bytes that best fit would find no room for."""
        free = [nbytes for nbytes, *_ in self._regions]
        lacking = 0
        for nbytes in blocks:
            most_bytes -= nbytes
            if most_bytes < 0:
                break
            size = _round_up(nbytes, ALIGNMENT)
            at = bisect_left(free, size)
            if at == len(free):
                lacking += size
            else:
                insort(free, free.pop(at) - size)
        return lacking

    def _settle(self) -> None:
        """Make free regions of the freed blocks, with their neighbours."""
        if not self._freed:
            return
        for nbytes, blocks in self._freed.items():
            for slab, start, _, events in blocks:
                end = start + _round_up(nbytes, ALIGNMENT)
                self._add_mark(slab, start, end, events)
                if start in slab.free_ends:
                    start = slab.free_ends[start]
                    self._take_region(slab, start)
                if end in slab.free:
                    end = self._take_region(slab, end)
                self._add_region(slab, start, end)
        self._freed.clear()
        self._sizes.clear()

    def _add_region(self, slab: Slab, start: int, end: int) -> None:
        self._serial += 1  # unique: a comparison of regions never reaches the slab
        slab.free[start] = (end, self._serial)
        slab.free_ends[end] = start
        insort(self._regions, (end - start, self._serial, slab, start))

    def _take_region(self, slab: Slab, start: int) -> int:
        """Removes the free region and returns its end."""
        end, serial = slab.free.pop(start)
        del slab.free_ends[end]
        del self._regions[bisect_left(self._regions, (end - start, serial))]
        return end

    # ---- marks: kept apart from regions, so that coalescing never makes a block wait for a neighbour's copy
    def _undone(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        if len(events) == 1:  # nearly always
            return () if self._accelerator.done(events[0]) else events
        return tuple(e for e in dict.fromkeys(events) if not self._accelerator.done(e))

    def _add_mark(self, slab: Slab, start: int, end: int, events: tuple[Event, ...]) -> None:
        marks = slab.marks
        at = bisect_left(marks, (start,))
        for neighbour in (at, at - 1):  # keeps the list from growing with events that have long passed
            if 0 <= neighbour < len(marks) and not self._undone(marks[neighbour][2]):
                del marks[neighbour]
                at -= neighbour < at
        if events := self._undone(events):
            marks.insert(at, (start, end, events))

    def _take_marks(self, slab: Slab, start: int, end: int) -> tuple[Event, ...]:
        """Removes the marks of a range that begins a free region (so that no mark reaches into it from below), cuts the
        one that reaches beyond it, and returns their undone events."""
        marks = slab.marks
        first = last = bisect_left(marks, (start,))
        events: list[Event] = []
        keep: list[tuple[int, int, tuple[Event, ...]]] = []
        while last < len(marks) and marks[last][0] < end:
            _, mark_end, mark_events = marks[last]
            last += 1
            if undone := self._undone(mark_events):
                events += undone
                if mark_end > end:
                    keep.append((end, mark_end, undone))
        marks[first:last] = keep
        return tuple(dict.fromkeys(events))

    # ---- slabs
    def _grow(self, size: int) -> bool:
        """Pin a slab that has room for ``size``. Idle slabs are all smaller than that, or the request had found room:
        as much of them as the new slab replaces is given back, so that sizes that differ from step to step end in few
        large slabs instead of more and more."""
        need = self._accelerator.slab_bytes(_round_up(size, mmap.PAGESIZE))
        idle = sorted((s for s in self._slabs if self._idle(s)), key=lambda s: s.nbytes, reverse=True)
        if self._pinned - sum(s.nbytes for s in idle) + need > self._budget:
            return False
        replaced = 0
        while idle:  # and none is referred to afterwards: they are to be gone before the new one comes
            slab = idle.pop(0)
            if replaced + slab.nbytes <= need or self._pinned + need > self._budget:
                replaced += slab.nbytes
                self._remove_slab(slab)
            del slab
        wanted = need if need * OWN_SLAB_SHARE >= self._slab_bytes else self._slab_bytes
        room = (self._budget - self._pinned) & -mmap.PAGESIZE
        wanted = self._accelerator.slab_bytes(max(need, min(wanted, room)))
        return self._add_slab(wanted if wanted <= room else need)

    def _idle(self, slab: Slab) -> bool:
        return slab.free.get(0, (0, 0))[0] == slab.nbytes and not any(self._undone(m[2]) for m in slab.marks)

    def _add_slab(self, nbytes: int) -> bool:
        try:
            slab = Slab(nbytes, self._accelerator)
        except (OSError, MemoryError, RuntimeError) as error:
            # The system or the driver has less than the budget says. Not asked again: each try costs the touching.
            self._budget = self._pinned
            say(
                f"host memory: could not page-lock another {format_bytes(nbytes)} ({error}); going on with "
                f"{format_bytes(self._pinned)}. Check `ulimit -l` and the container's memory limit",
                every_rank=True,
            )
            return False
        self._allocations += 1
        self._pinned += nbytes
        self._slabs.append(slab)
        self._add_region(slab, 0, nbytes)
        return True

    def _remove_slab(self, slab: Slab) -> None:
        self._take_region(slab, 0)
        self._slabs.remove(slab)
        self._pinned -= slab.nbytes
        self._accelerator.unregister_host(slab.address)
