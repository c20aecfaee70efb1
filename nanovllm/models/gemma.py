"""Gemma: Llama with gelu, norms with the factors 1 + weight, and scaled embeddings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

GELU = "gelu_pytorch_tanh"
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
    "head_dim": 256, "hidden_act": GELU, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Old files say "gelu", and mean its approximation by tanh."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    if fields["hidden_act"] != "gelu":
        check_activation(fields, GELU)
    if fields.get("hidden_activation") is not None:
        check_activation(fields, GELU, "hidden_activation")
    bias = fields.flag("attention_bias")
    return ModelConfig(**decoder_fields(fields), qkv_bias=bias, o_bias=bias)


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Llama's form, with other norms, another activation, and another embedding."""
    from nanovllm.layers.block import Block, pre_norms
    from nanovllm.layers.mixer import ROPE
    from nanovllm.models import gemma_parts, parts

    def block(index: int, make: "Build") -> Block:
        return Block(
            make,
            pre_norms(gemma_parts.norm(config), gemma_parts.norm(config)),
            parts.attention(config, index, make.inside("self_attn")),
            gemma_parts.mlp(config, make.inside("mlp")),
        )

    return gemma_parts.causal_lm(config, make, block, {ROPE: parts.rope(config, make)})


FAMILY = Family(read, build)
