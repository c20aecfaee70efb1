"""The attention, and the model of Llama's form, of families with interleaved ropes."""

from typing import Any

from nanovllm.layers.block import Block
from nanovllm.layers.interleaved import InterleavedAttention
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import SelfAttention
from nanovllm.models import parts
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM


def attention(config: ModelConfig, index: int, make: Build, **options: Any) -> SelfAttention:
    """The attention of layer `index`, with `options` among its arguments."""
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    options["rotated"] = int(config.head_dim * part)
    return parts.attention(config, index, make, InterleavedAttention, **options)


def interleaved_model(config: ModelConfig, make: Build) -> CausalLM:
    """Llama with an interleaved rope."""

    def block(index: int, make: Build) -> Block:
        return Block(
            make,
            parts.pre_norms(config),
            attention(config, index, make.inside("self_attn")),
            parts.mlp(config, make.inside("mlp")),
        )

    return parts.causal_lm(config, make, block)
