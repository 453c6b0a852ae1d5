"""What the user asked for, taken from Megatron's parsed arguments."""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_swap.virtual_optimizer.amount import VirtualOptions, virtual_options


@dataclass(frozen=True, slots=True)
class Options:
    smart_swap: bool
    host_memory_gib: float | None  # per rank; None: a share of what the node has free
    report_dir: str | None
    model: str  # fingerprint of everything that changes what a step saves: a plan fits only the same
    layout: Mapping[str, Any] = field(default_factory=dict)  # the same, by name of the argument
    virtual_optimizer: VirtualOptions | None = None

    @property
    def any(self) -> bool:
        """True if a feature is on. A setting without a feature changes nothing."""
        return bool(self.names)

    @property
    def names(self) -> str:
        """The flags of the features that are on, for messages."""
        on = {"--smart-swap": self.smart_swap, "--virtual-optimizer": self.virtual_optimizer is not None}
        return ", ".join(flag for flag, is_on in on.items() if is_on)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """Raises SettingError on values that cannot be."""
        layout = {name: getattr(args, name, None) for name in _SHAPES}
        model = " ".join(f"{name}={value}" for name, value in layout.items())
        return cls(args.smart_swap, args.swap_host_memory, args.swap_report_dir, model, layout, virtual_options(args))


_SHAPES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
    "global_batch_size", "num_experts", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
    "data_parallel_size", "sequence_parallel", "params_dtype", "transformer_impl", "recompute_granularity",
    "recompute_modules",
)  # fmt: skip
