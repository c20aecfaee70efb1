"""The parts of models with a `PlainConfig`."""

from collections.abc import Callable

from nanovllm.layers.activations import activation_of
from nanovllm.layers.block import Block, Norms
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.layer_norm import LayerNorm, PlusOneLayerNorm
from nanovllm.layers.mixer import ROPE, Mixer
from nanovllm.layers.parallel_block import ParallelBlock
from nanovllm.layers.plain_mlp import PlainMLP
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models import parts
from nanovllm.models.decoder import CausalLM, Decoder
from nanovllm.models.plain import PlainConfig

Head = Callable[[PlainConfig, Build, VocabParallelEmbedding], ParallelLMHead]


def norm(config: PlainConfig) -> RMSNorm:
    """A norm of hidden states."""
    size, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == "rms":
        return RMSNorm(size, eps)
    if config.norm == "layer plus one":
        return PlusOneLayerNorm(size, eps)
    return LayerNorm(size, eps, bias=config.norm == "layer")


def feed_forward(config: PlainConfig, make: Build) -> FeedForward:
    """The feed-forward part of a block."""
    if config.activation is None:
        return parts.mlp(config, make)
    return PlainMLP(
        make, config.hidden_size, config.intermediate_size, activation_of(config.activation),
        bias=config.mlp_bias,
    )  # fmt: skip


def block(config: PlainConfig, make: Build, mixer: Mixer, part: FeedForward | None = None) -> Block:
    """A block around a mixer, with this feed-forward part or the usual one."""
    first = "input_layernorm", norm(config)
    second = ("post_attention_layernorm", norm(config)) if config.num_norms == 2 else None
    part = part or feed_forward(config, make.inside("mlp"))
    if config.parallel:
        return ParallelBlock(make, first, mixer, part, second)
    return Block(make, Norms(before_mixer=first, before_feed_forward=second), mixer, part)


def build(
    config: PlainConfig,
    make: Build,
    attention: Callable[[PlainConfig, int, Build], Mixer] = parts.attention,
    head: Head = parts.head,
) -> CausalLM:
    """The model with blocks around this attention, and one rope."""

    def made(index: int, make: Build) -> Block:
        return block(config, make, attention(config, index, make.inside("self_attn")))

    decoder = Decoder(
        make, parts.embedding(config, make), parts.blocks(config, make, made), norm(config),
        {ROPE: parts.rope(config, make)},
    )  # fmt: skip
    return CausalLM(make, decoder, head(config, make, decoder.embed_tokens))
