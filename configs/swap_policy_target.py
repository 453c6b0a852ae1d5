"""No out of memory: stay below a peak, to leave room for longer sequences, larger batches or another process.

    --smart-swap --swap-policy-config configs/swap_policy_target.py
"""


class SwapPolicyConfig:
    def __init__(self):
        self.target_mode = True
        self.target_memory = 40 * 1024**3  # bytes; below the floor it is an error that names the floor
