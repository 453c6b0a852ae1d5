"""``adapt_mem_func_wrapper``: a user's own autograd Function as a module that is measured, planned and moved."""
from __future__ import annotations

from typing import Any

import torch

from mindspeed_swap import runtime


def adapt_mem_func_wrapper(auto_function: type[torch.autograd.Function], *args: Any) -> Any:
    """``auto_function.apply(*args)``, which adaptive memory optimization may keep, swap or recompute.

    It is known by the name of the class, within the layer that calls it. Arguments and results are those of ``apply``.
    Without the feature, or outside a training step, it is ``apply``. To be recomputed the Function must depend on its
    arguments and the random state alone. Raises TypeError if ``auto_function`` is no autograd Function.
    """
    if not (isinstance(auto_function, type) and issubclass(auto_function, torch.autograd.Function)):
        raise TypeError(
            "adapt_mem_func_wrapper: expected a class derived from torch.autograd.Function (not its apply), found "
            f"{auto_function!r:.80}"
        )
    return runtime.call(auto_function.__name__, auto_function.apply, args, {})
