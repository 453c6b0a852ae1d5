"""The waits of the streamed optimizer, by name. Tests remove each in turn and must then fail.

LOAD_AFTER_COMPUTE and STORE_AFTER_STEP cannot fail on the simulated device, whose compute is synchronous.
"""
from __future__ import annotations

from enum import Enum


class Wait(Enum):
    LOAD_AFTER_COMPUTE = "a new buffer is filled after whatever used its memory, or the state, before"
    STEP_AFTER_LOAD = "the optimizer reads a slice after the copy in has written it"
    STORE_AFTER_STEP = "the copy out starts after the optimizer has written the slice"
    REFILL_AFTER_STORE = "a buffer is filled again after the copy out has read it"
    END_AFTER_STORE = "buffers are given up, and the state at rest is read, after the last copies out"
    DROP_AFTER_LOAD = "a buffer that came in ahead and is not used is given up after the copy in has written it"
