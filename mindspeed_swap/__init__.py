"""mindspeed_swap: a memory hierarchy for Megatron training."""

__version__ = "0.1.0"
__all__ = ["__version__"]
