"""Arcee's AFM: Llama with the square of relu in place of a gate."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.plain import PlainConfig, activation

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2560, "intermediate_size": 18_432,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "relu2",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 128_001,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> PlainConfig:
    """Biases in all of attention, or in all feed-forward layers."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    return PlainConfig(
        **decoder_fields(fields),
        activation=activation(fields),
        norm="rms",
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def build(config: PlainConfig, make: "Build") -> "CausalLM":
    """Usual attention."""
    from nanovllm.models import plain_parts

    return plain_parts.build(config, make)


FAMILY = Family(read, build)
