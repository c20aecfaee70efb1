"""SmolLM3: Llama with layers that rotate nothing."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0, "no_rope_layers": None,
    "no_rope_layer_interval": 4, "tie_word_embeddings": True, "eos_token_id": 128_001,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Only layers that rotate nothing may have a window."""
    fields = Fields(file, DEFAULTS)
    check_activation(fields)
    return ModelConfig(
        **decoder_fields(fields, has_unrotated=True),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


FAMILY = Family(read)
