"""torchtune's OffloadActivations, its file as it is in the package 0.6.1 from PyPI, around each microbatch's forward.

Its package imports data sets and models that are of no use here; only its own file and the two that it needs are
imported. Those need torchao with NF4Tensor (0.15.0 has it, 0.18.0 has not).
"""
from __future__ import annotations

import functools
import importlib
import sys
import types
from importlib.machinery import PathFinder
from typing import Any

from points import Context, Point


def points(context: Context) -> list[Point]:
    return [
        Point("torchtune", "torchtune OffloadActivations", plugin="torchtune_offload"),
        Point("torchtune@stash1", "torchtune OffloadActivations", plugin="torchtune_offload", plugin_setting="1"),
    ]


def offload_class() -> Any:
    """Raises ImportError that says what to carry."""
    found = PathFinder.find_spec("torchtune")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torchtune is not installed: carry the wheels torchtune 0.6.1 and torchao 0.15.0")
    root = found.submodule_search_locations[0]
    for name in ("", ".modules", ".utils", ".training"):
        package = types.ModuleType("torchtune" + name)
        package.__path__ = [root + name.replace(".", "/")]
        sys.modules[package.__name__] = package
    sys.modules["torchtune.modules"].TiedLinear = importlib.import_module("torchtune.modules.tied_linear").TiedLinear
    sys.modules["torchtune.utils"].get_logger = importlib.import_module("torchtune.utils._logging").get_logger
    return importlib.import_module("torchtune.training._activation_offloading").OffloadActivations


def install(setting: str) -> None:
    from megatron.core.pipeline_parallel import schedules

    offload = offload_class()
    original = schedules.forward_step
    keep = {"max_fwd_stash_size": int(setting)} if setting else {}

    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        # One for each: a manager wants its backward over before the next forward, and pipelines do not grant that.
        with offload(**keep):
            return original(*args, **kwargs)

    schedules.forward_step = forward_step
