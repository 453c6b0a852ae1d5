"""What we do, as named ranges in the user's own ``torch.profiler`` (or NVTX) trace. Without one they cost nothing."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

PREFIX = "mindspeed_swap: "
_NOTHING = nullcontext()


def span(what: str, of: object) -> AbstractContextManager[object]:
    """Context manager: a range of the name ``mindspeed_swap: what of`` where a profiler runs."""
    if not profiler._is_profiler_enabled:  # a plain flag of torch, set by every profiler of its own
        return _NOTHING
    return torch.profiler.record_function(f"{PREFIX}{what} {of}")
