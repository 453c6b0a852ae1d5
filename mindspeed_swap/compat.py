"""Opt-in: makes MindSpeed's import path of ``adapt_mem_func_wrapper`` work where MindSpeed is not installed.

``import mindspeed_swap.compat`` before ``from mindspeed.core.memory.adaptive_memory.adaptive_memory_function import
adapt_mem_func_wrapper``. It serves that path and nothing else, and only on request: code that looks for MindSpeed must
not find it by default. Where MindSpeed is installed, its module gets our function.
"""
from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from mindspeed_swap.adaptive_memory import adapt_mem_func_wrapper

_PATH = "mindspeed.core.memory.adaptive_memory.adaptive_memory_function"


def install() -> None:
    """Idempotent."""
    if _mindspeed_is_installed():
        replace_in_mindspeed()
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


def replace_in_mindspeed() -> bool:
    """Ours in the place of MindSpeed's function, if that module can be imported. False if it is not there."""
    try:
        module = __import__(_PATH, fromlist=["adapt_mem_func_wrapper"])
    except ImportError:
        return False
    vars(module)["adapt_mem_func_wrapper"] = adapt_mem_func_wrapper
    return True


def _mindspeed_is_installed() -> bool:
    if "mindspeed" in sys.modules:
        return bool(sys.modules["mindspeed"].__spec__)
    return find_spec("mindspeed") is not None


install()
