"""What Megatron draws random numbers from: PyTorch's generators and those of its tracker."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_swap.core.again import RandomState, packed_state, unpacked_state


class MegatronRandomState(RandomState):
    """Of a tracker that CUDA graphs can follow (``--te-rng-tracker``) the states are generators, which draws change in
    place: what they hold is kept, and put back into the same ones."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def get(self) -> Any:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracked = get_cuda_rng_tracker().get_states()
        for name, state in tracked.items():
            if isinstance(state, torch.Generator):
                tracked[name] = packed_state(state.get_state())
        return (*super().get(), tracked)

    def set(self, state: Any) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        *generators, tracked = state
        super().set(generators)
        tracker, states = get_cuda_rng_tracker(), dict(tracked)
        live = tracker.get_states()
        for name, packed in tracked.items():
            if isinstance(packed, bytes):
                states[name] = live[name]
                live[name].set_state(unpacked_state(packed))
        tracker.set_states(states)

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
