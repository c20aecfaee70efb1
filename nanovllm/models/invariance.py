"""What `batch_invariant=True` can hold: errors name the rest, before weights are loaded."""

from typing import TYPE_CHECKING

import torch

from nanovllm.layers.cache_spec import TokenCache

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.models.config import ModelConfig


def check_invariance(config: "Config", model_config: "ModelConfig") -> None:
    """Raise a ValueError if some kernel's rows would depend on the other rows of a step."""
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    reason = None
    if on_gpu and dtype not in ("bfloat16", "float16"):
        reason = f"dtype={dtype!r}"
    elif config.enable_lora and _has_latents(model_config):  # PyTorch multiplies some of them
        reason = "adapters next to latent attention"
    if reason is not None:
        where = "GPU" if on_gpu else "CPU"
        raise ValueError(f"batch_invariant=True does not yet hold on a {where} with {reason}")


def _has_latents(model_config: "ModelConfig") -> bool:
    caches = (cache for layer in model_config.layers for cache in layer.cache.each)
    return any(isinstance(cache, TokenCache) and cache.value_width is not None for cache in caches)
