"""What the garbage collector does while a step runs. A heap as large as Megatron's takes 0.3 s to look at."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1 << 30  # collections of a generation before one of the next


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing: where the host's time is measured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def collected_young() -> Iterator[None]:
    """Collections of young objects only. What hooks keep until backward would have the whole heap looked at every
    hundred steps or so; by the end of a step it is gone."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], _NEVER, _NEVER)
    ours = gc.get_threshold()
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # else somebody has set them meanwhile
            gc.set_threshold(*before)
