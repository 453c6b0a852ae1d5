"""mindspeed_swap: a memory hierarchy for Megatron training."""

from mindspeed_swap.version import __version__

__all__ = ["__version__"]
