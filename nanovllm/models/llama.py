"""Llama 2 to 3.3, and other models published under this name: SmolLM2, TinyLlama, Yi, the R1
distillations into Llama. The oldest files lack the fields that later ones introduced.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.windows import NO_WINDOW

if TYPE_CHECKING:
    from nanovllm.layers.build import Build
    from nanovllm.models.decoder import CausalLM

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


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """A norm before each part of a layer; the parts are attention and a gated layer."""
    from nanovllm.layers.block import Block
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        return Block(
            make,
            parts.pre_norms(config),
            parts.attention(config, index, make.inside("self_attn")),
            parts.mlp(config, make.inside("mlp")),
        )

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build)
