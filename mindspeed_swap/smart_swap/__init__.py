"""SmartSwap: finds in a few measured steps which saved tensors to swap. Here: what a policy file imports.

``AUTO`` as a setting's value: derived from what was measured, by the rule that ``swap_policy_config.py`` tells.
"""
from mindspeed_swap.smart_swap.knobs import AUTO, SwapPolicyPref

__all__ = ["AUTO", "SwapPolicyPref"]
