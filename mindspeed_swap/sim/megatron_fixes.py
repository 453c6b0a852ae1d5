"""What stock megatron-core needs to train where there is neither a GPU nor apex nor Transformer Engine.

Each fix belongs to one module of Megatron. All are attributes that Megatron looks up when it trains, so they may be set
any time before that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fix = Callable[[types.ModuleType], None]


def neutralise_compile_helpers(module: types.ModuleType | None = None) -> None:
    """Skip compiling the dataset helpers where they are compiled already. Real GPUs need it as much.

    The wheel of megatron-core ships ``helpers_cpp*.so`` but no Makefile, and ``compile_helpers()`` ends the process if
    ``make`` fails. A source checkout, which has the Makefile, keeps Megatron's function.
    """
    module = module or importlib.import_module("megatron.core.datasets.utils")
    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if compiled and not (Path(str(module.__file__)).parent / "Makefile").exists():
        module.compile_helpers = _already_compiled  # type: ignore[attr-defined]


def _already_compiled() -> None:
    """The dataset helpers came compiled."""


def allow_sequence_parallel_norm(module: types.ModuleType) -> None:
    """Torch's norms work under sequence parallel once their parameters say so; only apex's and TE's norms do.

    ``sequence_parallel`` on a parameter makes Megatron sum its gradient over the tensor parallel ranks: each has seen a
    part of the sequence.
    """
    norm = module.WrappedTorchNorm
    original = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        asked = config.sequence_parallel
        config.sequence_parallel = False  # what the original asserts
        try:
            built = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = asked
        for parameter in built.parameters():
            parameter.sequence_parallel = asked
        return built

    norm.__new__ = staticmethod(new)


def define_fp8_names(module: types.ModuleType) -> None:
    """``--recompute-modules layernorm`` asks TE whether fp8 is on, by names that are undefined without TE."""
    if hasattr(module, "FP8GlobalStateManager"):
        return

    def no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    module.FP8GlobalStateManager = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    module.activation_recompute_forward = no_context  # type: ignore[attr-defined]
    module.fp8_autocast = no_context  # type: ignore[attr-defined]


_FIXES: dict[str, Fix] = {
    "megatron.core.datasets.utils": neutralise_compile_helpers,
    "megatron.core.transformer.torch_norm": allow_sequence_parallel_norm,
    "megatron.core.tensor_parallel.random": define_fp8_names,
}


@functools.cache
def apply() -> None:
    """Once torch.cuda has been redirected: this imports Megatron. Idempotent."""
    for name, fix in _FIXES.items():
        fix(importlib.import_module(name))
