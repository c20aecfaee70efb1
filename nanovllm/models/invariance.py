"""What `batch_invariant=True` can hold: errors name the rest, before weights are loaded."""

from typing import TYPE_CHECKING

import torch

from nanovllm.layers.cache_spec import State, TokenCache

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.models.config import ModelConfig


def check_invariance(config: "Config", model_config: "ModelConfig") -> None:
    """Raise a ValueError if some kernel's rows would depend on the other rows of a step."""
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    reason = (_not_on_a_gpu if on_gpu else _not_on_a_cpu)(config, model_config)
    if reason is not None:
        where = "GPU" if on_gpu else "CPU"
        raise ValueError(f"batch_invariant=True does not yet hold on a {where} {reason}")


def _not_on_a_cpu(config: "Config", model_config: "ModelConfig") -> str | None:
    """Which products PyTorch computes, if there are some."""
    if config.enable_lora and _has_latents(model_config):
        return "with adapters next to latent attention"
    return None


def _not_on_a_gpu(config: "Config", model_config: "ModelConfig") -> str | None:
    """Which kernels for GPUs have no order of sums that holds for all steps, if some have none."""
    caches = [cache for layer in model_config.layers for cache in layer.cache.each]
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    if dtype not in ("bfloat16", "float16"):
        return f"with dtype={dtype!r}"
    if config.kv_cache_dtype != "auto":
        return f"with kv_cache_dtype={config.kv_cache_dtype!r}"
    quantization = model_config.quantization
    if quantization is not None and quantization.method in ("gguf", "mxfp4"):
        return f"with weights in {quantization.method}"
    if config.enable_lora and any(layer.experts for layer in model_config.layers):
        return "with adapters next to experts"
    if any(isinstance(cache, State) for cache in caches):
        return "with recurrent or convolution states"
    if _has_latents(model_config):
        return "with latent attention"
    # PyTorch divides the sums of norms and of gates by the number of rows.
    names = (matrix.name for layer in model_config.layers for matrix in layer.matrices)
    if any(name.startswith("altup.") for name in names):
        return "with several streams of hidden states"
    return None


def _has_latents(model_config: "ModelConfig") -> bool:
    caches = (cache for layer in model_config.layers for cache in layer.cache.each)
    return any(isinstance(cache, TokenCache) and cache.value_width is not None for cache in caches)
