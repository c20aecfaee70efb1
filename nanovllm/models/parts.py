"""The parts that most families compose their models of, made from the fields of a `ModelConfig`.

`build_model` builds the model of any family.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm.formats.format import PLAIN_FORMATS, Formats
from nanovllm.formats.names import EMBEDDING, HEAD
from nanovllm.layers.block import Block, Norms
from nanovllm.layers.block import pre_norms as named_pre_norms
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import ROPE, SelfAttention
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM, Decoder
from nanovllm.models.family import family_of, registered


def norm(config: ModelConfig) -> RMSNorm:
    """A norm of hidden states."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def pre_norms(config: ModelConfig) -> Norms:
    """A norm before each part of a block."""
    return named_pre_norms(norm(config), norm(config))


def attention(
    config: ModelConfig, index: int, make: Build, kind: type[SelfAttention] = SelfAttention,
    **others: Any,
) -> SelfAttention:  # fmt: skip
    """The attention of layer `index`, of the class `kind`, with `others` of its arguments."""
    heads, eps = config.heads(index), config.rms_norm_eps
    if config.qk_norm:
        others.setdefault("head_norms", tuple(RMSNorm(heads.head_dim, eps) for _ in range(2)))
    others.setdefault("rope", ROPE if config.rotated_layers[index] else None)
    return kind(
        make, config.hidden_size, heads, qkv_bias=config.qkv_bias, o_bias=config.o_bias, **others
    )


def mlp(config: ModelConfig, make: Build) -> MLP:
    """A dense feed-forward part, gated by silu."""
    return MLP(make, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)


def rope(config: ModelConfig, make: Build) -> RotaryEmbedding:
    """The rotation that all layers share."""
    return get_rope(
        config.head_dim, make.max_positions, config.max_position_embeddings, config.rope_parameters
    )


def causal_lm(config: ModelConfig, make: Build, block: Callable[[int, Build], Block]) -> CausalLM:
    """The model with these blocks, one rope, and a plain norm at the end."""
    decoder = Decoder(
        make, embedding(config, make), blocks(config, make, block), norm(config),
        {ROPE: rope(config, make)},
    )  # fmt: skip
    return CausalLM(make, decoder, head(config, make, decoder.embed_tokens))


def embedding(config: ModelConfig, make: Build, scale: float = 1.0) -> VocabParallelEmbedding:
    """The embedding's table."""
    sizes, stored = (config.vocab_size, config.hidden_size), make.formats.of_table(EMBEDDING)
    if stored.is_plain:
        return VocabParallelEmbedding(*sizes, make.ranks, scale)
    from nanovllm.layers.stored_embedding import StoredEmbedding

    return StoredEmbedding(*sizes, make.ranks, stored, scale)


def usual_model(config: ModelConfig, make: Build) -> CausalLM:
    """The form of Llama: attention and a gated layer in each block, with a norm before each."""

    def block(index: int, make: Build) -> Block:
        return Block(
            make,
            pre_norms(config),
            attention(config, index, make.inside("self_attn")),
            mlp(config, make.inside("mlp")),
        )

    return causal_lm(config, make, block)


def blocks(config: ModelConfig, make: Build, block: Callable[[int, Build], Block]) -> list[Block]:
    """The blocks of all layers, each made for its place in the model."""
    inside = make.inside("model")
    return [block(i, inside.inside(f"layers.{i}")) for i in range(config.num_hidden_layers)]


def head(
    config: ModelConfig, make: Build, embedding: VocabParallelEmbedding,
    scale: float = 1.0, soft_cap: float | None = None,
) -> ParallelLMHead:  # fmt: skip
    """The projection to the vocabulary.

    It shares the embedding's table if the config says so, unless the head is stored quantized.
    """
    if config.tie_word_embeddings and not embedding.is_plain:
        from nanovllm.layers.stored_embedding import tied_head

        return tied_head(embedding, scale, soft_cap)
    stored = make.formats.of(HEAD)
    made = ParallelLMHead(
        config.vocab_size, config.hidden_size, make.ranks, stored, scale=scale, soft_cap=soft_cap
    )
    if config.tie_word_embeddings and stored.is_plain:
        made.tie(embedding)
    return made


def build_model(
    config: ModelConfig,
    max_positions: int,
    ranks: Ranks = ALONE,
    whole_experts: bool = False,
    formats: Formats = PLAIN_FORMATS,
) -> CausalLM:
    """The model with parameters that are not filled, in PyTorch's default type and device."""
    formats = replace(formats, names=family_of(config.architecture, config.family).names)
    return made_with(config, Build(ranks, formats, max_positions, whole_experts))


def made_with(config: ModelConfig, make: Build) -> CausalLM:
    """As `build_model`, with the ranks, formats and limits `make` of another model."""
    build = family_of(config.architecture, config.family).build or usual_model
    model: CausalLM = build(config, make)
    if config.family or config.architecture in registered:
        from nanovllm.models.check import check_model

        check_model(config, model, make.ranks)
    return model
