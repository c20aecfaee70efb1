"""Helium: Llama with an interleaved rope."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040,
    "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20,
    "head_dim": 128, "rms_norm_eps": 1e-8, "max_position_embeddings": 4096,
    "rope_theta": 100_000.0, "eos_token_id": 2,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """The output projection of attention is square, and has no bias."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    config = ModelConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        raise ValueError(
            f"hidden_size={config.hidden_size} must be num_attention_heads="
            f"{config.num_attention_heads} times head_dim={config.head_dim}"
        )
    return config


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.interleaved import interleaved_model

    return interleaved_model(config, make)


FAMILY = Family(read, build)
