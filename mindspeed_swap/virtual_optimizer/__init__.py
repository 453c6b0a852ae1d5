"""Virtual optimizer: Adam's moments in host memory, updated by the optimizer's own arithmetic."""

from mindspeed_swap.virtual_optimizer.swap_tensor import (
    is_swap_tensor,
    swap_tensor_copy_wrapper,
    swap_tensor_func_wrapper,
    to_host,
)

__all__ = ["is_swap_tensor", "swap_tensor_copy_wrapper", "swap_tensor_func_wrapper", "to_host"]
