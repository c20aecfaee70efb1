"""Phi 1, 1.5 and 2: parallel blocks with one norm, biases everywhere, partly rotated heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.shapes import LayerShape
from nanovllm.models.spellings import errors_spell, partly_rotated, respelt

if TYPE_CHECKING:
    from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 51_200, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 24, "num_attention_heads": 32, "hidden_act": "gelu_new",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "qk_layernorm": False,
    "eos_token_id": 2,
}  # fmt: skip
SPELLING = {"layer_norm_eps": "rms_norm_eps"}
NAMES = Names(
    pieces={
        "self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
        "q_layernorm": "q_norm", "k_layernorm": "k_norm", "final_layernorm": "norm",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PhiConfig(PlainConfig):
    """With `norms_heads`, a LayerNorm for all query heads, and one for all key heads."""

    norms_heads: bool

    def layer_shape(self, index: int) -> LayerShape:
        shape = super().layer_shape(index)
        return replace(shape, num_others=shape.num_others + 4 * self.head_dim * self.norms_heads)


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> PhiConfig:
    """Without another part in the file, half of each head is rotated."""
    file = partly_rotated(respelt(file, SPELLING), 0.5)
    fields = Fields(file, respelt(DEFAULTS, SPELLING), NO_WINDOW)
    return PhiConfig(
        **decoder_fields(fields, partial_rotary=True),
        activation=activation(fields),
        parallel=True,
        own_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_outside=fields["hidden_size"] + fields["vocab_size"],
        norms_heads=fields.flag("qk_layernorm"),
    )


def build(config: PhiConfig, make: "Build") -> "CausalLM":
    """The head has a bias."""
    from nanovllm.layers.layer_norm import LayerNorm
    from nanovllm.layers.mixer import SelfAttention
    from nanovllm.models import plain_parts

    def attention(_: PlainConfig, index: int, make: "Build") -> "Mixer":
        heads, eps, norms = config.heads(index), config.rms_norm_eps, None
        if config.norms_heads:
            norms = LayerNorm(heads.head_dim, eps), LayerNorm(heads.head_dim, eps)
        return SelfAttention(
            make, config.hidden_size, heads, qkv_bias=True, o_bias=True, head_norms=norms
        )

    return plain_parts.build(config, make, attention, head)


def head(
    config: PlainConfig, make: "Build", embedding: "VocabParallelEmbedding"
) -> "ParallelLMHead":
    """The projection to the vocabulary, which shares the embedding's table or not."""
    from nanovllm.formats.names import HEAD
    from nanovllm.layers.biased_head import BiasedHead

    stored = make.formats.of(HEAD)
    made = BiasedHead(config.vocab_size, config.hidden_size, make.ranks, stored)
    if config.tie_word_embeddings and stored.is_plain:
        if not embedding.is_plain:
            raise ValueError("tie_word_embeddings with a quantized table is not supported")
        made.tie(embedding)
    return made


FAMILY = Family(read, build, NAMES)
