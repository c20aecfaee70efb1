"""Cohere's Command R, R+ and Aya: parallel blocks with a LayerNorm, and an interleaved rope."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.plain import PlainConfig
from nanovllm.models.shapes import LayerShape
from nanovllm.models.spellings import respelt

if TYPE_CHECKING:
    from nanovllm.layers.embed_head import ParallelLMHead
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM

SIZES: Mapping[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528,
    "num_hidden_layers": 40, "num_attention_heads": 64, "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
    "eos_token_id": 255_001,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {**SIZES, "rope_theta": 500_000.0, "use_qk_norm": False}
SPELLING = {"layer_norm_eps": "rms_norm_eps"}


@dataclass(frozen=True, kw_only=True)
class CohereConfig(PlainConfig):
    """Logits are multiplied by `logit_scale`. With `norms_heads`, each head has a LayerNorm."""

    logit_scale: float
    norms_heads: bool = False

    def layer_shape(self, index: int) -> LayerShape:
        shape, heads = super().layer_shape(index), self.heads(index)
        normed = (heads.num_heads + heads.num_kv_heads) * heads.head_dim * self.norms_heads
        return replace(shape, num_others=shape.num_others + normed)


def cohere_fields(fields: Fields) -> dict[str, Any]:
    """The fields of a config, also of Cohere 2."""
    check_activation(fields)
    bias = fields.flag("attention_bias")
    return dict(
        **decoder_fields(fields), activation=None, norm="layer without bias", parallel=True,
        own_norm=False, qkv_bias=bias, o_bias=bias, logit_scale=fields.number("logit_scale"),
    )  # fmt: skip


def read(file: Mapping[str, Any]) -> CohereConfig:
    """Biases in all of attention, or nowhere; no windows."""
    fields = Fields(respelt(file, SPELLING), respelt(DEFAULTS, SPELLING), NO_WINDOW)
    return CohereConfig(**cohere_fields(fields), norms_heads=fields.flag("use_qk_norm"))


def build(config: CohereConfig, make: "Build") -> "CausalLM":
    """The norms of heads are before the rotation."""
    from nanovllm.layers.head_layer_norm import head_layer_norms
    from nanovllm.models import interleaved, parts, plain_parts

    def attention(_: PlainConfig, index: int, make: "Build") -> "Mixer":
        norms = None
        if config.norms_heads:
            norms = head_layer_norms(config.heads(index), config.rms_norm_eps, make.ranks)
        return interleaved.attention(config, index, make, head_norms=norms)

    def head(_: PlainConfig, make: "Build", embedding: Any) -> "ParallelLMHead":
        return parts.head(config, make, embedding, scale=config.logit_scale)

    return plain_parts.build(config, make, attention, head)


FAMILY = Family(read, build)
