"""Virtual optimizer: Adam's moments in host memory, updated by the optimizer's own arithmetic.

``amount`` (the flag) needs no torch and is imported with the argument parser; nothing else is.
"""

__all__: list[str] = []  # what users may import is in swap_tensor
