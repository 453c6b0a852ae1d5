"""The waits that keep copies and compute in order, by name. Tests remove each in turn and must then fail.

OFFLOAD_AFTER_COMPUTE and LOAD_AFTER_COMPUTE cannot fail on the simulated device, whose compute is synchronous.
"""
from __future__ import annotations

from enum import Enum


class Wait(Enum):
    OFFLOAD_AFTER_COMPUTE = "the copy out starts after the kernels that write the tensor"
    RELEASE_AFTER_OFFLOAD = "device memory is given up after the copy out has read it"
    LOAD_AFTER_COMPUTE = "the copy back starts after the kernels that last used the recycled block"
    USE_AFTER_LOAD = "backward reads after the copy back has written"
    SLAB_AFTER_COPY = "host memory is written again after the copy back has read it"
    FREE_AFTER_COPY = "memory of a tensor nobody wants any more is freed after a copy under way is done with it"

    __hash__ = object.__hash__  # in C, see State
