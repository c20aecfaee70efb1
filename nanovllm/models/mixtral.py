"""Mixtral: Mistral with experts in all layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SparseConfig,
    all_layers,
    experts_per_token,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "eos_token_id": 2, "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True, **EVERY_LAYER}
# Each expert's gate is w1, its up projection w3, its down projection w2.
EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def read(file: Mapping[str, Any]) -> SparseConfig:
    """The shares of a token's experts add up to 1. If there is a window, all layers have it."""
    fields = Fields(file, DEFAULTS, FIXED)
    check_activation(fields)
    num_experts = fields.size("num_local_experts")
    per_token = experts_per_token(fields, num_experts)
    return SparseConfig(
        **decoder_fields(fields),
        experts=ExpertsConfig(
            num_experts,
            fields.size("intermediate_size"),
            Routing(per_token=per_token, normalized=True),
            all_layers(fields),
            size_name="intermediate_size",
        ),
    )


FAMILY = Family(read, sparse_model, Names(experts=EXPERTS, pieces={"block_sparse_moe": "mlp"}))
