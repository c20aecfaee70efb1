"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and an expert that all tokens share."""

from collections.abc import Mapping
from typing import Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    experts_per_token,
    layers_by_step,
    number_of_experts,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import MAX_LAYERS, Fields, check_activation, decoder_fields
from nanovllm.utils.checks import check_int

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "norm_topk_prob": False, "qkv_bias": True,
}  # fmt: skip
SHARED_SIZE = "shared_expert_intermediate_size"


def read(file: Mapping[str, Any]) -> SparseConfig:
    """Biases on queries, keys and values, unless `qkv_bias` is false."""
    fields = _with_layer_types(Fields(file, DEFAULTS))
    check_activation(fields)
    num_experts = number_of_experts(fields)
    per_token = experts_per_token(fields, num_experts)
    shared = SharedExpert(
        fields.size(SHARED_SIZE), "shared_expert", is_gated=True, size_name=SHARED_SIZE
    )
    return SparseConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("qkv_bias"),
        experts=ExpertsConfig(
            num_experts,
            fields.size("moe_intermediate_size"),
            Routing(per_token=per_token, normalized=fields.flag("norm_topk_prob")),
            layers_by_step(fields),
            shared,
        ),
    )


def _with_layer_types(fields: Fields) -> Fields:
    """Every second of the first `max_window_layers` layers has the window, if there is one."""
    if fields["layer_types"] is not None or not fields.flag("use_sliding_window"):
        return fields
    last = check_int("max_window_layers", fields["max_window_layers"], 0)
    types = [
        "full_attention" if index % 2 or index >= last else "sliding_attention"
        for index in range(fields.size("num_hidden_layers", MAX_LAYERS))
    ]
    return Fields({**fields.file, "layer_types": types}, DEFAULTS)


FAMILY = Family(read, sparse_model)
