import mindspeed_swap.megatron_adaptor  # noqa: F401, I001  before anything of Megatron

# GPT pretraining with Megatron's own trainer (megatron-core 0.18 and 0.19; TP, SP, PP, VPP, DP, EP). But for the line
# above this is a plain pretrain script.
import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

import measure
import oom_message
import sdpa_attention
from mindspeed_swap.sim.megatron_fixes import neutralise_compile_helpers

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One pipeline stage of the model that the arguments describe."""
    args = get_args()
    config = core_transformer_config_from_args(args) if config is None else config
    use_te = args.transformer_impl == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config, use_te, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> tuple[torch.Tensor | None, ...]:
    """The next microbatch on the device; nothing on inner pipeline stages. Tensor parallel ranks each read it."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return (None,) * len(BATCH_KEYS)
    batch = next(data)
    return tuple(batch[key].cuda(non_blocking=True) for key in BATCH_KEYS)


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of the losses and the number of tokens; Megatron divides."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    tokens, labels, loss_mask, positions = get_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    return model(tokens, positions, None, labels=labels), partial(loss_func, loss_mask)


def datasets_provider(sizes: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test sets: --data-path, or --mock-data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # attention is causal
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    wanted = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset, sizes, wanted, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # built on every rank, see get_batch


def main() -> None:
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:  # whoever sets it wants two runs to end with the same bits
        torch.use_deterministic_algorithms(True)
    args = parse_and_validate_args(extra_args_provider=measure.add_arguments)
    neutralise_compile_helpers()
    sdpa = os.environ.get("SDPA", "1" if args.transformer_impl == "local" else "0")
    if sdpa == "1" and args.attention_backend is not AttnBackend.unfused:
        sdpa_attention.use_sdpa(args.transformer_impl)
    how = not args.measure_no_hashes, args.measure_until or ()
    measurement = measure.start(args.measure_file, *how) if args.measure_file else None
    configuration = next(iter(inspect.signature(pretrain).parameters))
    by_name = {  # the order differs between versions
        configuration: pretrain_cfg_container_from_args(args),
        "train_valid_test_dataset_provider": datasets_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "model_provider": model_provider,
    }
    try:
        pretrain(**by_name)
    except SystemExit as end:  # --exit-interval and its like
        if end.code:
            raise
    if measurement is not None:
        measurement.write()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with oom_message.one_line():
        main()
