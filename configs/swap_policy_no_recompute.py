"""In place of recompute: take --recompute-* out of the script (or leave a part of it in) and give this.

Moves only what the device lacks without recompute, only large tensors, and takes its time to find the best plan.

    --smart-swap --swap-policy-config configs/swap_policy_no_recompute.py
"""


class SwapPolicyConfig:
    def __init__(self):
        self.warmup_step = 3
        self.stable_step = 11  # eight tries
        self.tensor_size_filter = 1024**2  # bytes
        self.policy_v2 = False  # any tensor, no stages
