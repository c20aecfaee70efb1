"""Qwen3 with experts in all layers, or in some: 30B-A3B, 235B-A22B."""

from collections.abc import Mapping
from typing import Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SparseConfig,
    experts_per_token,
    layers_by_step,
    number_of_experts,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields
from nanovllm.models.qwen3 import SIZES

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "norm_topk_prob": False,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> SparseConfig:
    """If there is a window, all layers have it."""
    fields = Fields(file, DEFAULTS, EVERY_LAYER)
    check_activation(fields)
    num_experts = number_of_experts(fields)
    per_token = experts_per_token(fields, num_experts)
    return SparseConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        experts=ExpertsConfig(
            num_experts,
            fields.size("moe_intermediate_size"),
            Routing(per_token=per_token, normalized=fields.flag("norm_topk_prob")),
            layers_by_step(fields),
        ),
    )


FAMILY = Family(read, sparse_model)
