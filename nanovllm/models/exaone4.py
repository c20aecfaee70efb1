"""EXAONE 4: norms after each part and of heads, and next to windows, layers without rotation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.window_pattern import FIXED, with_layer_types

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 2,
    "sliding_window": 4096,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """Without a `sliding_window`, all layers rotate and attend to all tokens."""
    has_windows = {**DEFAULTS, **file}["sliding_window"] is not None
    fields = Fields(with_layer_types(file, DEFAULTS) if has_windows else file, DEFAULTS, FIXED)
    check_activation(fields)
    others = decoder_fields(fields)
    if has_windows:
        others["rotated_layers"] = tuple(w is not None for w in others["sliding_windows"])
    return ModelConfig(**others, qk_norm=True)


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Llama with other norms."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.norm_places import post_norms
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        return Block(
            make,
            post_norms(parts.norm(config), parts.norm(config)),
            parts.attention(config, index, make.inside("self_attn")),
            parts.mlp(config, make.inside("mlp")),
        )

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build)
