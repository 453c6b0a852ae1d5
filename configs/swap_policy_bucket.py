"""Even load on the link: in every SwapStage of two layers at most so many bytes move, and all of those do.

    --smart-swap --swap-policy-config configs/swap_policy_bucket.py
"""
from mindspeed_swap.smart_swap import SwapPolicyPref


class SwapPolicyConfig:
    def __init__(self):
        self.policy_v2 = True
        self.policy_pref = SwapPolicyPref.BETTER_PERFORMANCE
        self.num_attn_layers_per_stage = 2
        self.swap_bucket_size = 512 * 1024**2  # bytes per stage
        self.target_mode = True
        self.target_memory = 0  # all that the buckets take
