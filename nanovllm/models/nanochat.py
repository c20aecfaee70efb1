"""nanochat: norms without weights, also of embeddings and heads, relu squared, capped logits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.plain import PlainConfig
from nanovllm.models.shapes import LayerShape

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 8192,
    "num_hidden_layers": 12, "num_attention_heads": 6, "max_position_embeddings": 2048,
    "hidden_act": "relu2", "final_logit_softcapping": 15.0, "eos_token_id": 1,
}  # fmt: skip
NAMES = Names(pieces={"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"})


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(PlainConfig):
    """A logit x becomes c * tanh(x / c), with c = `soft_cap`, if there is one."""

    soft_cap: float | None

    def layer_shape(self, index: int) -> LayerShape:
        shape = super().layer_shape(index)
        return replace(shape, num_others=shape.num_others - 2 * self.hidden_size)


def read(file: Mapping[str, Any]) -> NanoChatConfig:
    """Biases in all of attention, or nowhere; no windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields, "relu2")
    has_cap = fields["final_logit_softcapping"] is not None
    bias = fields.flag("attention_bias")
    return NanoChatConfig(
        **decoder_fields(fields),
        activation="relu2",
        norm="rms",
        qkv_bias=bias,
        o_bias=bias,
        num_outside=-fields["hidden_size"],  # the last norm has no weight
        soft_cap=fields.number("final_logit_softcapping") if has_cap else None,
    )


def build(config: NanoChatConfig, make: "Build") -> "CausalLM":
    """The rope rotates backwards.

    Heads are normalized after their rotation, which is the same as before it, without weights and
    if cosines and sines have no factor.
    """
    from nanovllm.layers.block import Block, pre_norms
    from nanovllm.layers.late_head_norms import LateHeadNorms
    from nanovllm.layers.mixer import ROPE, SelfAttention
    from nanovllm.layers.rotary_embedding import RotaryEmbedding, rope_frequencies
    from nanovllm.layers.weightless_norm import WeightlessNorm
    from nanovllm.models import parts, plain_parts
    from nanovllm.models.decoder import CausalLM
    from nanovllm.models.normed_embedding import DecoderOfNormed

    frequencies, factor = rope_frequencies(
        config.head_dim, make.max_positions, config.max_position_embeddings, config.rope_parameters
    )

    def norm(size: int = config.hidden_size) -> WeightlessNorm:
        return WeightlessNorm(size, config.rms_norm_eps)

    def block(index: int, make: "Build") -> Block:
        attention = parts.attention(
            config, index, make.inside("self_attn"),
            SelfAttention if factor == 1.0 else LateHeadNorms,
            head_norms=(norm(config.head_dim), norm(config.head_dim)),
        )  # fmt: skip
        feed_forward = plain_parts.feed_forward(config, make.inside("mlp"))
        return Block(make, pre_norms(norm(), norm()), attention, feed_forward)

    rope = RotaryEmbedding(-frequencies, factor, make.max_positions)
    decoder = DecoderOfNormed(
        make, parts.embedding(config, make), parts.blocks(config, make, block), norm(),
        {ROPE: rope},
    )  # fmt: skip
    head = parts.head(config, make, decoder.embed_tokens, soft_cap=config.soft_cap)
    return CausalLM(make, decoder, head)


FAMILY = Family(read, build, NAMES)
