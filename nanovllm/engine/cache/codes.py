"""Checks and sizes for a KV cache in codes of 8 bits, with scales."""

from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.latent import Latent
from nanovllm.models.config import ModelConfig


def check_codes(model_config: ModelConfig) -> None:
    """Raise a ValueError if some layers do not keep keys and values."""
    kinds = {type(cache) for layer in model_config.layers for cache in layer.cache.each}
    if Latent in kinds or KeysAndValues not in kinds:
        kept = "latent rows" if Latent in kinds else "states"
        raise ValueError(
            f"kv_cache_dtype='fp8' needs keys and values; this model's layers keep {kept}"
        )


def scales_of_slot(groups: CacheGroups) -> int:
    """How many scales a slot has for each token: one for each head."""
    layers = [layer for group in groups.groups for layer in group.layers]
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(
            "kv_cache_dtype='fp8' needs layers whose keys have one shape; this model's have"
            f" {sorted(shapes)} as numbers of heads and head_dim"
        )
    ((num_heads, _),) = shapes
    return num_heads
