"""Llama 2 to 3.3, and other models published under this name: SmolLM2, TinyLlama, Yi, the R1
distillations into Llama. The oldest files lack the fields that later ones introduced.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "eos_token_id": 2,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Biases in all of attention, or in all feed-forward layers; no windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


FAMILY = Family(read)
