"""What a plan fits: every argument of Megatron that changes what a step saves, or when."""
from __future__ import annotations

import argparse
import dataclasses
from enum import Enum
from typing import Any

# Named whatever their value is; reports show them.
_SHAPES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
    "global_batch_size", "num_experts", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
    "data_parallel_size", "sequence_parallel", "params_dtype", "transformer_impl", "recompute_granularity",
    "recompute_modules",
)  # fmt: skip
# The model's configuration does not have them under this name.
_OTHERS = (
    "padded_vocab_size", "max_position_embeddings", "position_embedding_type", "untie_embeddings_and_output_weights",
    "swiglu", "squared_relu", "group_query_attention", "use_flash_attn", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage", "use_distributed_optimizer",
    "overlap_grad_reduce", "overlap_param_gather", "accumulate_allreduce_grads_in_fp32", "optimizer",
    "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_megatron_fsdp", "use_torch_fsdp2",
    "bias_swiglu_fusion", "bias_gelu_fusion", "quick_geglu", "hybrid_layer_pattern", "hybrid_override_pattern", "spec",
    "reset_attention_mask", "create_attention_mask_in_dataloader", "no_persist_layer_norm", "grad_reduce_in_bf16",
    "main_grads_dtype", "heterogeneous_layers_config_path",
)  # fmt: skip
# A run that goes on from a checkpoint may set them in another way.
_OF_A_START = {"perform_initialization", "use_cpu_initialization", "init_model_with_meta_device", "config_logger_dir"}


def layout_of(args: argparse.Namespace) -> dict[str, Any]:
    """By name of the argument."""
    return {name: getattr(args, name, None) for name in _SHAPES}


def fingerprint(args: argparse.Namespace, config: type | None = None) -> str:
    """``name=value`` of ``layout_of`` and of whatever else is not as by default. ``config``: Megatron's dataclass that
    describes a model; of its floats only those that decide what there is, as others scale what is there anyway."""
    named = layout_of(args)
    for name in _OTHERS:
        if value := getattr(args, name, None):
            named[name] = value
    for field in dataclasses.fields(config) if config is not None else ():
        if field.name in named or field.name in _OF_A_START or not hasattr(args, field.name):
            continue
        value, default = getattr(args, field.name), _default(field)
        if value != default and _tells(field.name, value):
            named[field.name] = value
    return " ".join(f"{name}={value}" for name, value in named.items())


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _tells(name: str, value: Any) -> bool:
    if isinstance(value, float):
        return name.endswith(("dropout", "capacity_factor"))
    return value is None or isinstance(value, bool | int | str | list | tuple | Enum) or type(value).__name__ == "dtype"
