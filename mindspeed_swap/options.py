"""What the user asked for, taken from Megatron's parsed arguments."""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_swap.errors import SettingError
from mindspeed_swap.fine_grained.schema import SwapConfig, read_swap_config
from mindspeed_swap.fingerprint import fingerprint, layout_of
from mindspeed_swap.log import say, speak
from mindspeed_swap.smart_swap.knobs import KNOBS
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.policy_file import SHIPPED, read_policy_file
from mindspeed_swap.units import GIB
from mindspeed_swap.virtual_optimizer.amount import FLAG, VirtualOptions, virtual_options


@dataclass(frozen=True, slots=True)
class Options:
    smart_swap: bool
    host_memory_gib: float | None  # per rank; None: a share of what the node has free
    report_dir: str | None
    model: str  # fingerprint of everything that changes what a step saves: a plan fits only the same
    layout: Mapping[str, Any] = field(default_factory=dict)  # the most important of it, by name of the argument
    virtual_optimizer: VirtualOptions | None = None
    policy: Policy = Policy()
    plan_file: str | None = None
    plan_save: str | None = None
    adaptive: bool = False
    plan_cache: str | None = None
    swap_config: SwapConfig | None = None

    @property
    def plans(self) -> bool:
        """True if a step is recorded and planned."""
        return self.smart_swap or self.adaptive or self.swap_config is not None

    @property
    def names_modules(self) -> bool:
        """True if the plan may speak of modules."""
        return self.adaptive or self.swap_config is not None

    @property
    def any(self) -> bool:
        """True if a feature is on. A setting without a feature changes nothing."""
        return bool(self.names)

    @property
    def names(self) -> str:
        """The flags of the features that are on, for messages."""
        on = {
            "--smart-swap": self.smart_swap,
            "--adaptive-memory-optimization": self.adaptive,
            "--swap-config": self.swap_config is not None,
            "--virtual-optimizer": self.virtual_optimizer is not None,
        }
        return ", ".join(flag for flag, is_on in on.items() if is_on)

    @classmethod
    def from_args(cls, args: argparse.Namespace, config: type | None = None) -> Options:
        """``config``: Megatron's class, see ``fingerprint``. Raises SettingError on values that cannot be."""
        layout, model = layout_of(args), fingerprint(args, config)
        policy, report, save = Policy(), args.swap_report_dir, args.swap_plan_save
        if args.smart_swap:
            policy, settings = _policy(args.swap_policy_config, args.swap_memory_target)
            if policy.saves_most:
                _stream_optimizer(args)
            folder = settings.get("output_root_path", KNOBS["output_root_path"].default)
            if settings.get("save_profiler_data"):
                report = report or folder
            if settings.get("save_policy"):
                save = save or str(Path(folder) / "plan.{rank}.json")
        if args.adaptive_memory_optimization:
            policy = _adaptive_policy(args.swap_memory_target)
        config = None
        if args.swap_config is not None:
            policy, config = Policy(listed=True), _swap_config(args)
        return cls(
            args.smart_swap, args.swap_host_memory, report, model, layout, virtual_options(args), policy,
            args.swap_plan, save, args.adaptive_memory_optimization,
            args.swap_plan_cache, config,
        )  # fmt: skip


def _policy(path: str | None, target_gib: float | None) -> tuple[Policy, Mapping[str, Any]]:
    """Of the policy file and the flag above it, and what the file says by name. Raises SettingError."""
    settings = read_policy_file(path or SHIPPED)
    speak(settings.get("print_level", 1) < 2, settings.get("print_rank", 0) < 0)
    policy = Policy.of(settings)
    if target_gib is not None:
        policy = policy.with_target(int(target_gib * GIB))
    unused = [name for name in settings if not KNOBS[name].effect]
    if unused:
        say(f"smart-swap: without effect here, nothing corresponds to them: {', '.join(unused)}")
    say(f"smart-swap: {policy.line}; policy of {path or 'swap_policy_config.py as installed'}")
    return policy, settings


def _swap_config(args: argparse.Namespace) -> SwapConfig:
    """Raises SettingError."""
    stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    sequence = bool(getattr(args, "sequence_parallel", False))
    config = read_swap_config(args.swap_config, args.num_layers, stages, chunks, sequence)
    for note in config.notes:
        say(f"swap-config: {note}")
    return config


def _adaptive_policy(target_gib: float | None) -> Policy:
    """Raises SettingError."""
    if target_gib == 0:
        raise SettingError(
            "--swap-memory-target 0 moves all that --smart-swap can move; --adaptive-memory-optimization needs the "
            "peak that a step may have, such as 30"
        )
    policy = Policy(recomputes=True)
    if target_gib is not None:
        policy = policy.with_target(int(target_gib * GIB))
    say(f"{policy.feature}: {policy.line}")
    return policy


def _stream_optimizer(args: argparse.Namespace) -> None:
    """BETTER_MEMORY_SAVING is the virtual optimizer, all of it, streamed. COMPAT then sees its flag."""
    if args.virtual_optimizer is not None:
        raise SettingError(
            f"policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING and {FLAG} both move the optimizer's state: leave the "
            "flag out, or set SwapPolicyPref.BETTER_PERFORMANCE"
        )
    args.virtual_optimizer, args.virtual_optimizer_mode = ["all"], "streamed"

