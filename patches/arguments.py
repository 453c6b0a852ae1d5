"""Our flags in the parser of any Megatron script, and what happens once they have been parsed."""
from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.options import Options
from mindspeed_swap.patches import compat
from mindspeed_swap.patches.registry import Patch, in_place_of
from mindspeed_swap.units import gib_argument
from mindspeed_swap.virtual_optimizer.amount import MODES

_OURS = "--swap-host-memory"  # a flag that nobody else has
CAPACITY = "MINDSPEED_SWAP_DEVICE_CAPACITY"


def _target(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) == 0:
            return 0.0
    return gib_argument(text)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    if _OURS in parser._option_string_actions:
        return parser  # MindSpeed's feature manager and Megatron ask for them for the same parser
    group = parser.add_argument_group("mindspeed_swap", "memory hierarchy: host memory behind device memory")
    group.add_argument(
        "--smart-swap", action="store_true",
        help="SmartSwap: record a step, survive out of memory meanwhile, plan which saved tensors go to host memory.",
    )  # fmt: skip
    group.add_argument(
        "--adaptive-memory-optimization", action="store_true",
        help="Keep, swap or recompute, chosen per module and tensor by what was measured; fills the device.",
    )  # fmt: skip
    group.add_argument(
        "--swap-config", default=None, metavar="FILE",
        help="YAML file that lists which layers and operators are swapped or recomputed (swap_config).",
    )  # fmt: skip
    group.add_argument(
        "--swap-policy-config", default=None, metavar="FILE",
        help="--smart-swap: policy file, Python that is EXECUTED (default: swap_policy_config.py as installed).",
    )  # fmt: skip
    group.add_argument(
        "--swap-memory-target", type=_target, default=None, metavar="GB",
        help="both: peak of a step in GB of 1024^3 bytes, below what the device has; 0 (--smart-swap) moves all.",
    )  # fmt: skip
    group.add_argument(
        "--swap-plan-save", default=None, metavar="FILE",
        help="both: write the plan of the Stable phase there; {rank} is replaced, or .rankN added.",
    )  # fmt: skip
    group.add_argument(
        "--swap-plan", default=None, metavar="FILE",
        help="both: run the plan saved there and skip the search.",
    )  # fmt: skip
    group.add_argument(
        "--swap-plan-cache", default=None, metavar="DIR",
        help="both: keep found plans there, by model, layout, device and versions, and skip the search where one fits.",
    )  # fmt: skip
    group.add_argument(
        "--virtual-optimizer", nargs="+", default=None, metavar="GB",
        help="Adam's moments in host memory: all, or GB (1024^3 bytes) per rank, one for all pipeline stages or each.",
    )  # fmt: skip
    group.add_argument(
        "--virtual-optimizer-mode", choices=MODES, default="auto",
        help="mapped: the optimizer's kernels use them where they are; streamed: they pass through device buffers.",
    )  # fmt: skip
    group.add_argument(
        "--virtual-optimizer-master", action="store_true",
        help="Move fp32 main parameters too: of parameters whose moments all move. They do not count as GB.",
    )  # fmt: skip
    group.add_argument(
        "--swap-host-memory", type=gib_argument, default=None, metavar="GB",
        help="all features: host memory per rank, in GB of 1024^3 bytes (default: a share of what the node has free).",
    )  # fmt: skip
    group.add_argument(
        "--swap-report-dir", default=None, metavar="DIR",
        help="all features: write rank<N>/summary.json and trace.json (Perfetto) there; see mindspeed-swap report.",
    )  # fmt: skip
    return parser


def check(args: argparse.Namespace) -> None:
    """Combinations that cannot work. Raises SettingError naming both flags and the remedy."""
    found = compat.errors(args)
    features = ["--smart-swap", "--adaptive-memory-optimization"]
    for name in ("swap_policy_config", "swap_memory_target", "swap_plan_save", "swap_plan", "swap_plan_cache"):
        of = features[:1] if name == "swap_policy_config" else features
        if getattr(args, name, None) is not None and not any(compat.is_on(args, flag) for flag in of):
            are_off = "which is off" if len(of) == 1 else "which are off"
            setting = f"--{name.replace('_', '-')} is a setting of {' and '.join(of)}"
            remedy = f"add {' or '.join(of)}"
            if compat.is_on(args, "--swap-config"):
                remedy = "leave it out, --swap-config says itself what moves"
            found.append(f"{setting}, {are_off}: {remedy}")
    if getattr(args, "swap_plan", None) and getattr(args, "swap_plan_cache", None):
        found.append("--swap-plan and --swap-plan-cache both say which plan to run: give one")
    if found:
        raise SettingError("\n".join(found))


@in_place_of
def _add_megatron_arguments(original: Any, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return _with_help_that_prints(add_arguments(original(parser)))


def _with_help_that_prints(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Some Megatrons have a bare % in a help text, and ``--help`` of any script dies of it (seen in 0.19.2)."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def activate(args: argparse.Namespace) -> None:
    """Megatron's arguments are complete: start what they ask for. Once; later calls do nothing. Raises SettingError."""
    runtime = sys.modules.get("mindspeed_swap.runtime")
    if runtime is not None and runtime.started():
        return
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = getattr(args, "multi_latent_attention", False)
    options = Options.from_args(args, MLATransformerConfig if latent else TransformerConfig)
    if options.any:
        check(args)  # again: what the script gave as defaults is known by now
        for text in compat.untested(args):
            say(text)
        from mindspeed_swap import megatron_adaptor

        megatron_adaptor.activate(options)
    elif unused := [flag for flag in ("--swap-report-dir", "--swap-host-memory") if compat.is_on(args, flag)]:
        say(f"{' and '.join(unused)} without {', '.join(compat.COMPAT)}: nothing changes")


@in_place_of
def _parse_args(original: Any, *rest: Any, **kwargs: Any) -> Any:
    args = original(*rest, **kwargs)
    on = [flag for flag in compat.COMPAT if compat.is_on(args, flag)]
    if on and getattr(args, "yaml_cfg", None) is not None:  # Megatron then calls nothing that we could see
        raise SettingError(
            f"{on[0]} cannot be used with --yaml-cfg: Megatron takes other ways there; give its arguments on the "
            "command line"
        )
    return args


@in_place_of
def _validate_args(original: Any, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    if not hasattr(args, "smart_swap"):  # not of our parser, so without our flags
        _must_not_be_given()
        return original(args, *rest, **kwargs)
    check(args)  # before Megatron, which may refuse its own flag for a reason that would not help
    result = original(args, *rest, **kwargs)
    activate(args)
    if CAPACITY in os.environ:
        from mindspeed_swap.core.accelerator import cap_device

        cap_device(int(os.environ.get("LOCAL_RANK", "0")))
    return result


def _must_not_be_given() -> None:
    """The arguments came from elsewhere, such as a parser that ran before us and ignored what it did not know."""
    ours = argparse.ArgumentParser(add_help=False)
    add_arguments(ours)
    given = [text for text in sys.argv[1:] if text.partition("=")[0] in ours._option_string_actions]
    if given:
        raise SettingError(
            f"{given[0]} was not read: Megatron's arguments were parsed before import mindspeed_swap.megatron_adaptor; "
            "make it the first line of the training script"
        )


PATCHES: list[Patch] = [
    ("megatron.training.arguments.add_megatron_arguments", _add_megatron_arguments),
    ("megatron.training.arguments.parse_args", _parse_args),
    ("megatron.training.arguments.validate_args", _validate_args),
]
