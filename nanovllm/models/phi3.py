"""Phi 3, 3.5 and 4, text only: Llama with fused tensors, a window, and partly rotated heads."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.names import Names
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "eos_token_id": 32_000,
}  # fmt: skip
FIXED: Mapping[str, Any] = {"use_sliding_window": True, **EVERY_LAYER}
OLD_ROPE_TYPES = {"su": "longrope", "yarn": "longrope"}


def read(file: Mapping[str, Any]) -> ModelConfig:
    """`partial_rotary_factor` may limit the rotation to a part of each head."""
    fields = Fields(file, DEFAULTS, FIXED)
    check_activation(fields)
    return ModelConfig(**decoder_fields(fields, partial_rotary=True, old_rope_types=OLD_ROPE_TYPES))


FAMILY = Family(read, names=Names(stores_fused=True))
