"""SmartSwap: finds in a few measured steps which saved tensors to swap. Here: what a policy file imports."""
from mindspeed_swap.smart_swap.knobs import AUTO, SwapPolicyPref

__all__ = ["AUTO", "SwapPolicyPref"]
