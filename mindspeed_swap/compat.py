"""Opt-in: makes MindSpeed's import path of ``adapt_mem_func_wrapper`` work where MindSpeed is not installed.

``import mindspeed_swap.compat`` before ``from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import
adapt_mem_func_wrapper``. It serves that path and nothing else, and only on request: code that looks for MindSpeed must
not find it by default. Where MindSpeed is installed, its module gets our function.
"""
from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from mindspeed_swap.adaptive_memory import adapt_mem_func_wrapper

_PATH = "mindspeed.core.memory.adaptive_memory.adaptive_memory_function"


def install() -> None:
    """Idempotent."""
    if _mindspeed_is_installed():
        with contextlib.suppress(ImportError):
            vars(import_module(_PATH))["adapt_mem_func_wrapper"] = adapt_mem_func_wrapper
        return
    parts = _PATH.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if name not in sys.modules:
            module = sys.modules[name] = ModuleType(name, __doc__)
            module.__path__ = []
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
    vars(sys.modules[_PATH])["adapt_mem_func_wrapper"] = adapt_mem_func_wrapper


def _mindspeed_is_installed() -> bool:
    if "mindspeed" in sys.modules:
        return bool(sys.modules["mindspeed"].__spec__)
    return find_spec("mindspeed") is not None


install()
