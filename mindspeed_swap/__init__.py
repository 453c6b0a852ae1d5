"""mindspeed_swap: a memory hierarchy for Megatron training."""

from mindspeed_swap.hooks import custom_operator, include_paths, library_paths
from mindspeed_swap.version import __version__

__all__ = ["__version__", "custom_operator", "include_paths", "library_paths"]
