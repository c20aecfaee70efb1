"""Seed-OSS: Llama with two fields for the biases of attention."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 155_136, "hidden_size": 4096, "intermediate_size": 27_648,
    "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 524_288, "eos_token_id": 2,
    "attention_bias": True, "attention_out_bias": False,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Biases of queries, keys and values, and of the output; no windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


FAMILY = Family(read)
