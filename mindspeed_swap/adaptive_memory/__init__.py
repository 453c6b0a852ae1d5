"""``--adaptive-memory-optimization``: keep, swap or recompute, chosen per module and tensor.

The choice is SmartSwap's search with all three verbs (Policy.recomputes); what executes it is the core. Here is what
only this feature has.
"""
from mindspeed_swap.adaptive_memory.adaptive_memory_function import adapt_mem_func_wrapper

__all__ = ["adapt_mem_func_wrapper"]
