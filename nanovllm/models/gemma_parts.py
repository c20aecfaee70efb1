"""The parts that Gemma's models share, made from the fields of a `ModelConfig`."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.layers.block import Block
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.gelu import GeluTanhAndMul
from nanovllm.layers.layer import Build
from nanovllm.layers.norm_places import sandwich_norms
from nanovllm.layers.plus_one_norm import PlusOneAttention, PlusOneRMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import parts
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM, Decoder


def norm(config: ModelConfig, size: int | None = None) -> PlusOneRMSNorm:
    """A norm of hidden states, or of vectors of another size."""
    return PlusOneRMSNorm(size or config.hidden_size, config.rms_norm_eps)


def mlp(config: ModelConfig, make: Build) -> MLP:
    """A dense feed-forward part, gated by gelu."""
    return MLP(
        make, config.hidden_size, config.intermediate_size, activation=GeluTanhAndMul,
        bias=config.mlp_bias,
    )  # fmt: skip


def sandwich_block(
    config: ModelConfig, index: int, make: Build, *, rope: str, query_scalar: float,
    soft_cap: float | None,
) -> Block:  # fmt: skip
    """A block with norms before and after each part, which rotates by `rope`.

    Scores are divided by the root of `query_scalar`.
    """
    others: dict[str, Any] = dict(rope=rope, scale=query_scalar**-0.5, soft_cap=soft_cap)
    if config.qk_norm:
        others["kind"] = PlusOneAttention
        others["head_norms"] = tuple(norm(config, config.head_dim) for _ in range(2))
    attention = parts.attention(config, index, make.inside("self_attn"), **others)
    norms = sandwich_norms(*(norm(config) for _ in range(4)))
    return Block(make, norms, attention, mlp(config, make.inside("mlp")))


def causal_lm(
    config: ModelConfig, make: Build, block: Callable[[int, Build], Block],
    ropes: Mapping[str, RotaryEmbedding], soft_cap: float | None = None,
) -> CausalLM:  # fmt: skip
    """The model with these blocks and ropes, and a soft cap on its logits."""
    embedding = parts.embedding(config, make, scale=config.hidden_size**0.5)
    blocks = parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding, soft_cap=soft_cap))
