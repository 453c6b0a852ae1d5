"""Where MindSpeed is installed too: in its feature manager ours take the place of its own features of the same flags.

MindSpeed's manager asks each feature to add its arguments, to check them and to register patches. Its list is changed
in place, so that MindSpeed finds ours whether it is imported after us or was before. What its own features have by then
put into torch and Megatron is taken out again; only its memory allocator cannot be, and is refused (core/accelerator).
"""
from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from mindspeed_swap.log import say

FLAGS = ("smart-swap", "virtual-optimizer", "adaptive-memory-optimization")
_MANAGER = "mindspeed.features_manager.features_manager"
# Where functions that its own three features put elsewhere come from.
_THEIRS = (
    "mindspeed.core.memory.smart_swap",
    "mindspeed.core.memory.adaptive_memory",
    "mindspeed.core.optimizer.virtual_optimizer",
    "mindspeed.features_manager.memory.smart_swap",
    "mindspeed.features_manager.optimizer.virtual_optimizer",
)
_LEVEL = 2  # of MindSpeed's optimisation levels: applied if asked for


def take_over(add_arguments: Callable[[argparse.ArgumentParser], Any], validate: Callable[[Any], None]) -> bool:
    """Put our features into MindSpeed's manager, if MindSpeed can be imported. False: it is not there.

    ``add_arguments`` adds all our flags to a parser that may have them; ``validate`` checks parsed arguments and starts
    what they ask for. Both may be called any number of times.
    """
    if find_spec("mindspeed") is None:
        return False
    try:
        manager = importlib.import_module(_MANAGER).MindSpeedFeaturesManager
        base = importlib.import_module("mindspeed.features_manager.feature").MindSpeedFeature
    except (ImportError, AttributeError) as error:
        say(f"mindspeed is installed, and its feature manager cannot be used ({error}): its flags are left alone")
        return False
    kind = _feature_class(base, add_arguments, validate)
    ours = {flag.replace("-", "_"): kind(flag, _LEVEL) for flag in FLAGS}
    lists = [manager.FEATURES_LIST]
    legacy = getattr(sys.modules["mindspeed.features_manager"], "FEATURES_LIST", None)  # read by its older adaptor
    if isinstance(legacy, list) and legacy is not manager.FEATURES_LIST:
        lists.append(legacy)
    for features in lists:
        _replace(features, ours)
    removed = _take_out(importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager)
    names = ", ".join(f"--{flag}" for flag in FLAGS)
    say(f"mindspeed: {names} are mindspeed_swap's, in the place of its own{'; what they patched is undone' * removed}")
    return True


def _feature_class(base: type, add_arguments: Callable[[Any], Any], validate: Callable[[Any], None]) -> type:
    class SwapFeature(base):  # type: ignore[misc,valid-type]
        """One of our three flags. The first to be asked adds and checks all there is."""

        def register_args(self, parser: argparse.ArgumentParser) -> None:
            add_arguments(parser)

        def validate_args(self, args: argparse.Namespace) -> None:
            if hasattr(args, "swap_host_memory"):  # MindSpeed also asks about objects that are no arguments of a script
                validate(args)

        def register_patches(self, patch_manager: Any, args: argparse.Namespace) -> None:
            """None: MindSpeed asks before Megatron's arguments are known. ``validate`` installs what they ask for."""

    return SwapFeature


def _replace(features: list[Any], ours: dict[str, Any]) -> None:
    """In place: the first of a name becomes ours, others of it go, and what MindSpeed has not is added."""
    missing, kept = dict(ours), []
    for feature in features:
        name = feature.feature_name
        if name not in ours:
            kept.append(feature)
        elif name in missing:
            kept.append(missing.pop(name))
    features[:] = [*kept, *missing.values()]


def _take_out(patches: Any) -> bool:
    """Undo what MindSpeed's own features have patched. True if there was anything."""
    found = False
    for patch in patches.patches_info.values():
        functions = [*patch.wrappers, *([patch.patch_func] if patch.patch_func is not None else [])]
        if not any(map(_is_theirs, functions)):
            continue
        found = True
        wrappers = [wrapper for wrapper in patch.wrappers if not _is_theirs(wrapper)]
        function = None if _is_theirs(patch.patch_func) else patch.patch_func
        applied = patch.is_applied
        if applied:
            patch.remove_patch()
        patch.wrappers[:], patch.patch_func = wrappers, function
        if applied and (wrappers or function is not None):
            patch.apply_patch()
    return _take_out_of_tensor() or found


def _take_out_of_tensor() -> bool:
    """Its virtual optimizer replaces methods of torch.Tensor, past its patch manager."""
    import torch

    found = False
    for name, method in list(vars(torch.Tensor).items()):
        if inspect.isfunction(method) and _is_theirs(method):
            found = True
            inherited = getattr(torch.Tensor.__base__, name, None)
            original = next((value for value in _closed_over(method) if callable(value)), inherited)
            if original is inherited:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)
    return found


def _closed_over(function: Any) -> Iterable[Any]:
    return inspect.getclosurevars(function).nonlocals.values()


def _is_theirs(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return any(module == name or module.startswith(f"{name}.") for name in _THEIRS)
