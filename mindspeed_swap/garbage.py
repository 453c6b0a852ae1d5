"""What the garbage collector does while a step runs. A heap as large as Megatron's takes 0.3 s to look at."""
from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NEVER = 1 << 30  # collections of a generation before one of the next
_ENOUGH = 16  # objects, for a collection that is due after one

_ends: list[Callable[[], None]] = []  # of what is in force: a worker that is forked within a step is in none


def _end_in_child() -> None:
    while _ends:
        _ends.pop()()


os.register_at_fork(after_in_child=_end_in_child)


@contextmanager
def _until(end: Callable[[], None]) -> Iterator[None]:
    _ends.append(end)
    try:
        yield
    finally:
        if end in _ends:
            _ends.remove(end)
            end()


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing: where the host's time is measured."""
    was_on = gc.isenabled()
    gc.disable()

    def end() -> None:
        if was_on:
            gc.enable()

    with _until(end):
        yield


@contextmanager
def collected_young() -> Iterator[None]:
    """Collections of young objects only. What hooks keep until backward would have the whole heap looked at every
    hundred steps or so; by the end of a step it is gone, and older ones are collected if it is their turn."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], _NEVER, _NEVER)
    ours = gc.get_threshold()

    def end() -> None:
        if gc.get_threshold() != ours:
            return  # somebody has set them meanwhile
        if gc.isenabled() and before[0] > 0:
            # Python's own rule, applied now: there are few new objects at the end of a step, so it would not be.
            gc.set_threshold(1, *before[1:])
            _ = [set() for _ in range(_ENOUGH)]
        gc.set_threshold(*before)

    with _until(end):
        yield
