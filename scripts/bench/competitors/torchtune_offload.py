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
from pathlib import Path
from typing import Any

from points import Context, Point


def points(context: Context) -> list[Point]:
    group, plugin = "torchtune OffloadActivations", "torchtune_offload"
    return [
        Point("torchtune", group, plugin=plugin, missing=missing()),
        Point("torchtune@stash1", group, plugin=plugin, plugin_setting="1", missing=missing()),
    ]


def folder(package: str) -> Path | None:
    """Found without importing it, which would import torch and more."""
    found = PathFinder.find_spec(package)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def missing() -> str:
    tune, ao = folder("torchtune"), folder("torchao")
    if tune is None or ao is None or not (ao / "dtypes" / "nf4tensor.py").exists():
        return "install torchtune 0.6.1 and torchao 0.15.0"
    return ""


def offload_class() -> Any:
    root = str(folder("torchtune"))
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
