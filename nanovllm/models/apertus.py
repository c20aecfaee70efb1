"""Apertus: Llama with norms of heads, and xIELU in place of a gate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.buffer_names import BufferNames
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.plain import PlainConfig
from nanovllm.models.shapes import LayerShape

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "xielu",
    "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "rope_theta": 12_000_000.0,
}  # fmt: skip
ROPE: Mapping[str, Any] = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
NAMES = BufferNames(
    pieces={
        "attention_layernorm": "input_layernorm",
        "feedforward_layernorm": "post_attention_layernorm",
    },
    buffers=(".act_fn.beta", ".act_fn.eps"),  # xIELU's constants
)


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(PlainConfig):
    """Each layer's xIELU has two parameters."""

    def layer_shape(self, index: int) -> LayerShape:
        shape = super().layer_shape(index)
        return replace(shape, num_others=shape.num_others + 2)


def read(file: Mapping[str, Any]) -> ApertusConfig:
    """Without parameters of the rotation, those of the default are Llama 3's with other values."""
    if not file.get("rope_scaling") and not file.get("rope_parameters"):
        file = {**file, "rope_parameters": {**ROPE}}
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields, "xielu")
    return ApertusConfig(
        **decoder_fields(fields),
        activation="xielu",
        norm="rms",
        qk_norm=True,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
    )


def build(config: PlainConfig, make: "Build") -> "CausalLM":
    """Usual attention."""
    from nanovllm.models import plain_parts

    return plain_parts.build(config, make)


FAMILY = Family(read, build, NAMES)
