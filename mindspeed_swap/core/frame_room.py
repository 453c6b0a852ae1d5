"""FrameRoom: calls whose Python frames, and those of all they call, lie in one piece of memory.

Note: [A call at the end of a chunk]
CPython, from 3.11 on, keeps a thread's frames in chunks of 16 KiB. A call that does not fit has the next chunk mapped
by the system, and unmapped as it returns: from where a chunk ends, each call takes two system calls and a page fault,
11 us instead of 0.08. Layers of Megatron call about that deep, and what hooks add decides which functions meet the end:
a step of experts had 320 such calls under a plan and 64 without one. A frame that is larger than a chunk gets one with
room for all that follow.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
# Of eight bytes each. The chunk is of the next power of two: a quarter MiB is left, for some thousand calls.
FRAME_SLOTS = 1 << 15


def with_room(function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """``function(*args, **kwargs)``."""
    return function(*args, **kwargs)


_IN_CHUNKS = sys.implementation.name == "cpython" and sys.version_info >= (3, 11)
# The room is only set aside: no page of it is touched before a frame needs it. In a build without the GIL it would be.
if _IN_CHUNKS and "t" not in sys.abiflags:
    with_room.__code__ = with_room.__code__.replace(co_stacksize=FRAME_SLOTS)
