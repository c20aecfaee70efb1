"""Qwen3-Next: Qwen3.5 with experts, and with its projections fused and divided by key heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.formats.names import FUSED
from nanovllm.layers.delta_sizes import DeltaNames
from nanovllm.models.experts import layers_by_step
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.qwen2_moe import SHARED_SIZE
from nanovllm.models.qwen3_5 import NAMES, SIZES, gated_fields
from nanovllm.models.qwen3_5_moe import (
    INNER,
    GatedSparseConfig,
    build,
    draft_layer,
    experts_config,
)

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, INNER: 512,
    SHARED_SIZE: 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": None,
}  # fmt: skip
TENSORS = DeltaNames(
    {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"},
    norm="norm", out_proj="out_proj", by_key_head=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(GatedSparseConfig):
    """Files have two tensors of projections."""

    delta_names = TENSORS


def read(file: Mapping[str, Any]) -> Qwen3NextConfig:
    """Layers with experts: every `decoder_sparse_step`th, except `mlp_only_layers`."""
    raw = Fields(file, DEFAULTS)
    experts = experts_config(raw, layers_by_step(raw), raw.flag("norm_topk_prob"))
    return Qwen3NextConfig(**gated_fields(file, DEFAULTS), experts=experts)


FUSED_NAMES = {**FUSED, "in_proj": tuple(TENSORS.projections)}
FAMILY = Family(read, build, replace(NAMES, fused=FUSED_NAMES), draft_layer)
