"""Youtu-LLM: Llama with DeepSeek's latent attention."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.latents import (
    SIZES,
    LatentConfig,
    is_interleaved,
    latent_decoder,
    latent_fields,
)

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 32, "num_attention_heads": 16, "max_position_embeddings": 131_072,
    "tie_word_embeddings": True, "rope_interleave": True, "eos_token_id": 128_001,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> LatentConfig:
    """Dense layers alone."""
    fields = latent_fields(file, DEFAULTS)
    return LatentConfig(**latent_decoder(fields, interleaved=is_interleaved(fields)))


def build(config: LatentConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.latent_parts import latent_model

    return latent_model(config, make)


FAMILY = Family(read, build)
