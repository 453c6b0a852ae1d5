"""What Megatron draws random numbers from: PyTorch's generators and those of its tracker."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_swap.core.again import RandomState


class MegatronRandomState(RandomState):
    """As Megatron's own checkpoint saves and restores it."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def get(self) -> Any:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return (*super().get(), get_cuda_rng_tracker().get_states())

    def set(self, state: Any) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        *generators, tracked = state
        super().set(generators)
        get_cuda_rng_tracker().set_states(tracked)

    @contextmanager
    def restored(self, state: Any) -> Iterator[None]:
        from megatron.core import utils

        open_ranges = getattr(utils, "_nvtx_range_messages", [])
        before = len(open_ranges)
        try:
            with super().restored(state):
                yield
        finally:
            while len(open_ranges) > before:  # a forward that was stopped has left its profiler ranges open
                utils.nvtx_range_pop()
