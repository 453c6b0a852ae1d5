"""Out of memory: train on the device as it is, moving no more than it lacks. What --smart-swap alone does.

    --smart-swap --swap-policy-config configs/swap_policy_fit.py
"""
from mindspeed_swap.smart_swap import AUTO


class SwapPolicyConfig:
    def __init__(self):
        self.redundant_memory = AUTO  # bytes to leave free; give a number if other processes share the device
        self.adjust_memory = AUTO
