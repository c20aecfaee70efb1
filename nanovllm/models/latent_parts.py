"""The parts of models with latent attention: blocks with or without experts, and whole models."""

from collections.abc import Callable

from nanovllm.layers.block import Block
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.latent_attention import LatentAttention
from nanovllm.layers.layer import Build
from nanovllm.models import parts
from nanovllm.models.decoder import CausalLM
from nanovllm.models.experts import sparse_mlp
from nanovllm.models.latents import LatentConfig, SparseLatentConfig
from nanovllm.models.later_layers import without_later


def latent_block(
    config: LatentConfig,
    kind: type[LatentAttention] = LatentAttention,
    residual_scale: float = 1.0,
) -> Callable[[int, Build], Block]:
    """Makes the block of each layer, with attention of the class `kind`."""

    def block(index: int, make: Build) -> Block:
        mixer = kind(make.inside("self_attn"), config.hidden_size, config.latent)
        part = feed_forward(config, index, make.inside("mlp"))
        norms = parts.pre_norms(config)
        return Block(make, norms, mixer, part, residual_scale=residual_scale)

    return block


def feed_forward(config: LatentConfig, index: int, make: Build) -> FeedForward:
    """The experts of a layer, or its gated part."""
    if isinstance(config, SparseLatentConfig) and index in config.experts.layers:
        return sparse_mlp(config, make)
    return parts.mlp(config, make)


def latent_model(config: LatentConfig, make: Build) -> CausalLM:
    """The form of Llama, with latent attention, and experts where the config says so.

    Tensors of layers that predict later tokens are skipped.
    """
    return without_later(parts.causal_lm(config, make, latent_block(config)), config)
