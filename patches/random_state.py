"""What Megatron draws random numbers from: PyTorch's generators and those of its tracker."""
from __future__ import annotations

from typing import Any

import torch

from mindspeed_swap.core.again import RandomState


class MegatronRandomState(RandomState):
    """As Megatron's own checkpoint saves and restores it."""

    def get(self) -> Any:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return torch.get_rng_state(), torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()

    def set(self, state: Any) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        cpu, device, tracked = state
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(device)
        get_cuda_rng_tracker().set_states(tracked)
