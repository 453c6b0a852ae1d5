"""``import mindspeed_swap.megatron_adaptor`` as the first line of a Megatron script makes our flags work.

Importing wraps the argument parser, nothing else: no build, thread, stream or pinned byte. (Where the user asks for
the simulated device by MINDSPEED_SWAP_DEVICE=sim, torch.cuda is redirected to it here, before Megatron is imported.)
The rest is installed when arguments have been parsed and a flag asks for it.
"""
from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from mindspeed_swap.npu_versions import import_torch

import_torch()  # first, for its message

from mindspeed_swap.errors import SettingError  # noqa: E402
from mindspeed_swap.options import Options  # noqa: E402

try:
    from mindspeed_swap.patches.registry import Installed, check_version
except ModuleNotFoundError as error:
    if error.name != "mindspeed_swap.patches":
        raise
    raise SettingError(  # in a checkout it lies beside the package, and installing puts it inside
        "mindspeed_swap is on the path but not installed: in its folder run  pip install -e ."
    ) from None

# Of before, if this module is reloaded: patches must not go on top of themselves.
_parser: Installed = globals().get("_parser") or Installed()
_step: Installed = globals().get("_step") or Installed()


def install() -> None:
    """What importing does. Raises SettingError."""
    if os.environ.get("MINDSPEED_SWAP_DEVICE") == "sim":
        from mindspeed_swap import sim

        sim.redirect_cuda()
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None and getattr(global_vars, "_GLOBAL_ARGS", None) is not None:
        raise SettingError(
            "import mindspeed_swap.megatron_adaptor comes after Megatron has parsed its arguments: "
            "make it the first line of the training script"
        )
    if find_spec("megatron") is None or find_spec("megatron.training") is None:
        raise SettingError(
            "megatron.training cannot be imported: install megatron-core 0.17 or newer, or put a Megatron-LM "
            "checkout on PYTHONPATH"
        )
    check_version()
    from mindspeed_swap.patches import arguments, mindspeed_features

    _parser.remove()
    _parser.install(arguments.PATCHES)
    if os.environ.get("MINDSPEED_SWAP_DEVICE") == "sim":
        from mindspeed_swap.sim import megatron_fixes

        megatron_fixes.apply()
    mindspeed_features.take_over(arguments.add_arguments, arguments.activate)


def activate(options: Options) -> None:
    """Arguments have been parsed and a feature is on: start the runtime and install its patches. Idempotent."""
    from mindspeed_swap import runtime
    from mindspeed_swap.patches import (
        distributed_optimizer,
        linear,
        modules,
        moe,
        recompute,
        schedules,
        training,
        transformer_layer,
    )

    if runtime.started():
        return
    runtime.start(options)
    around = (training, schedules, transformer_layer)
    for patches in (*around, linear, recompute) if options.plans else around:
        _step.install(patches.PATCHES)
    moe.install_into(_step)
    if options.names_modules:
        _step.install(modules.PATCHES)
        modules.install_into(_step)
    if options.virtual_optimizer is not None:
        _step.install(distributed_optimizer.PATCHES)


def remove() -> None:
    """Undo everything but the redirect of the simulated device."""
    from mindspeed_swap import runtime

    _step.remove()
    _parser.remove()
    runtime.stop()


install()
