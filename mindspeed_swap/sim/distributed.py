"""torch.distributed: NCCL moves bytes between devices; between simulated ones gloo does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Arguments that only NCCL understands.
_ONLY_NCCL = ("device_id", "device_ids", "pg_options")


def redirect() -> None:
    """Patch init_process_group, new_group and barrier wherever torch itself has bound them."""
    if not dist.is_available():
        return
    for name in ("init_process_group", "new_group", "barrier"):
        original = getattr(distributed_c10d, name)
        wrapper = _over_gloo(original, names_backend=name != "barrier")
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.distributed") and vars(module).get(name) is original:
                setattr(module, name, wrapper)


def _gloo(backend: Any) -> str | None:
    """``nccl``, ``cuda:nccl,cpu:gloo`` and no choice at all become gloo."""
    return "gloo" if backend is None or "nccl" in str(backend).lower() else backend


def _over_gloo(function: Callable, names_backend: bool) -> Callable:
    # new_group(ranks, timeout, backend); init_process_group(backend, ...)
    position = {"new_group": 2, "init_process_group": 0}.get(function.__name__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _ONLY_NCCL:
            kwargs.pop(name, None)
        if names_backend and position is not None:
            if len(args) > position:
                args = (*args[:position], _gloo(args[position]), *args[position + 1 :])
            else:
                kwargs["backend"] = _gloo(kwargs.get("backend"))
        return function(*args, **kwargs)

    return call
