"""torch's scaled_dot_product_attention as Megatron's core attention: flash kernels without Transformer Engine.

Megatron's own ``DotProductAttention`` (in pretrain_gpt.py: ``--attention-backend unfused``) keeps the whole matrix of
scores. Call ``use_sdpa()`` before the model is built.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models import backends
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


def use_sdpa(transformer_impl: str = "local") -> None:
    """Make it the core attention of the layer spec of ``--transformer-impl``."""
    provider = backends.LocalSpecProvider
    if transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider as provider
    provider.core_attention = lambda self: SDPACoreAttention


class SDPACoreAttention(MegatronModule):
    """Causal or full attention, with grouped queries and dropout. Takes and gives what DotProductAttention does.

    Raises NotImplementedError for what the kernels lack: a mask of the caller, packed sequences, context parallel.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise NotImplementedError("SDPA core attention: --context-parallel-size needs Transformer Engine")
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[sequence, batch, heads, channels] each -> [sequence, batch, heads * channels]."""
        mask_type = attn_mask_type or self.attn_mask_type
        if packed_seq_params is not None or mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise NotImplementedError(f"SDPA core attention: no packed sequences, and no mask but causal: {mask_type}")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Heads are split over the tensor parallel ranks: each draws its own dropout, as in DotProductAttention.
        own_random = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if own_random else contextlib.nullcontext():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attention_bias,
                is_causal=mask_type is AttnMaskType.causal,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        return context.permute(2, 0, 1, 3).reshape(context.shape[2], context.shape[0], -1)
