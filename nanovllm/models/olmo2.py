"""OLMo 2: norms after each part of a block, and over all heads of queries and of keys together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape

if TYPE_CHECKING:
    from nanovllm.layers.block import Block
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "eos_token_id": 50_279,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    """A norm of queries or of keys has a weight for each element of all heads."""

    def layer_shape(self, index: int) -> LayerShape:
        shape, heads = super().layer_shape(index), self.heads(index)
        norms = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        return replace(shape, num_others=shape.num_others + norms)


def read(file: Mapping[str, Any]) -> Olmo2Config:
    """Biases in all of attention, or nowhere; no windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    bias = fields.flag("attention_bias")
    return Olmo2Config(**decoder_fields(fields), qkv_bias=bias, o_bias=bias)


def block(config: Olmo2Config, index: int, make: "Build", **options: Any) -> "Block":
    """Layer `index`. `options` are arguments of its attention."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.full_width_norm import full_width_norms
    from nanovllm.layers.norm_places import post_norms
    from nanovllm.models import parts

    norms = full_width_norms(make, config.heads(index), config.rms_norm_eps)
    return Block(
        make,
        post_norms(parts.norm(config), parts.norm(config)),
        parts.attention(config, index, make.inside("self_attn"), head_norms=norms, **options),
        parts.mlp(config, make.inside("mlp")),
    )


def build(config: Olmo2Config, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models import parts

    return parts.causal_lm(config, make, lambda index, make: block(config, index, make))


FAMILY = Family(read, build)
