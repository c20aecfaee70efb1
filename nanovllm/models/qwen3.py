"""Qwen3, dense: Llama with a norm on each query and key head, and windows in late layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields

SIZES: Mapping[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 32_768, "sliding_window": 4096,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {**SIZES, "head_dim": 128, "max_window_layers": 28}


def read(file: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` is for all projections of attention."""
    fields = Fields(file, DEFAULTS)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
    )


FAMILY = Family(read)
