"""dots.llm1: Qwen3's attention, and experts after the first layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.experts import SparseConfig, layers_after_dense, sparse_model
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.sigmoid_experts import SPELLING, sigmoid_experts
from nanovllm.models.spellings import errors_spell, respelt

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 2048, "moe_intermediate_size": 1408, "n_shared_experts": None,
    "n_routed_experts": None, "num_experts_per_tok": None, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "sliding_window": 4096, "max_window_layers": 62,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True}


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> SparseConfig:
    """Layers from `max_window_layers` on have the window, if there is one."""
    fields = Fields(respelt(file, SPELLING, both=True), DEFAULTS, FIXED)
    check_activation(fields)
    bias = fields.flag("attention_bias")
    return SparseConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=sigmoid_experts(fields, layers_after_dense(fields)),
    )


FAMILY = Family(read, sparse_model)
