"""Granite 3 and 4, dense: Llama with factors of embeddings, scores, sums and logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "eos_token_id": 2, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """With the factors of embeddings, of scores, of what is added to residuals, and of logits."""

    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_scale: float


def read(file: Mapping[str, Any]) -> GraniteConfig:
    """Biases in all of attention, or in all feed-forward layers; no windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    return GraniteConfig(
        **decoder_fields(fields),
        **factors(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def factors(fields: Fields) -> dict[str, Any]:
    """The fields of a `GraniteConfig`. Logits are divided by `logits_scaling`."""
    return dict(
        embedding_scale=fields.number("embedding_multiplier"),
        attention_scale=fields.number("attention_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1.0 / fields.number("logits_scaling"),
    )


def build(
    config: GraniteConfig, make: "Build",
    feed_forward: "Callable[[Any, Build], FeedForward] | None" = None,
) -> "CausalLM":  # fmt: skip
    """Compose the model with its factors, and with a gated or another feed-forward part."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.mixer import ROPE
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> Block:
        inside = make.inside("self_attn")
        attention = parts.attention(config, index, inside, scale=config.attention_scale)
        part = (feed_forward or parts.mlp)(config, make.inside("mlp"))
        norms, scale = parts.pre_norms(config), config.residual_scale
        return Block(make, norms, attention, part, residual_scale=scale)

    embedding = parts.embedding(config, make, config.embedding_scale)
    blocks, ropes = parts.blocks(config, make, block), {ROPE: parts.rope(config, make)}
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding, scale=config.logit_scale))


FAMILY = Family(read, build)
