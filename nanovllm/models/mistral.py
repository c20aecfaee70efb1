"""Mistral 7B, Nemo and Small: Llama with a window in all layers, or in some."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "eos_token_id": 2,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True, "max_window_layers": 0}


def read(file: Mapping[str, Any]) -> ModelConfig:
    """With `layer_types` transformers 5 loads this name as Ministral: some layers have windows."""
    fields = Fields(file, DEFAULTS, FIXED)
    check_activation(fields)
    return ModelConfig(**decoder_fields(fields))


FAMILY = Family(read)
