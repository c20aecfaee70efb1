"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in late layers."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """With `use_sliding_window`, the layers from `max_window_layers` on have a window."""
    fields = Fields(file, DEFAULTS)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields),
        qkv_bias=True,
    )


FAMILY = Family(read)
