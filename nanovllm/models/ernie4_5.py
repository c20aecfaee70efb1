"""ERNIE 4.5, dense: Llama with an interleaved rope, and biases everywhere or nowhere."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0, "tie_word_embeddings": True, "eos_token_id": 2, "use_bias": False,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> ModelConfig:
    """No windows."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    bias = fields.flag("use_bias")
    return ModelConfig(**decoder_fields(fields), qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def build(config: ModelConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.interleaved import interleaved_model

    return interleaved_model(config, make)


FAMILY = Family(read, build)
