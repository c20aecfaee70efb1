"""Quantize keys and values for the cache: e4m3 codes, with a scale for each head of a token.

T tokens, KVH key heads, D head dimension.
"""

import torch

from nanovllm.kernels.kv_layer import CODES, SCALES, KVLayer

LARGEST = 448.0  # the largest code
SMALLEST_SCALE = 2.0**-100  # for heads of zeros


def quantize(
    x: torch.Tensor, fixed_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, KVH, D] and scales [T, KVH] of x [T, KVH, D].

    A computed scale is the smallest with which no code is too large; with a fixed scale, codes
    saturate. If a head has a NaN, its scale and so all its values are NaN, because not every kernel
    can read the code of NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    exact = largest / torch.full_like(largest, LARGEST)  # by a number, GPUs do not divide exactly
    if fixed_scale is not None:
        exact = torch.full_like(exact, fixed_scale).where(~exact.isnan(), exact)
    scales = round_up(exact).clamp(min=SMALLEST_SCALE)
    codes = (wide / scales[..., None]).clamp(-LARGEST, LARGEST).to(CODES)
    return codes, scales.to(SCALES)


def round_up(x: torch.Tensor) -> torch.Tensor:
    """Round x >= 0 up to the next bfloat16, returned as float32."""
    rounded = ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return rounded.where(x.isfinite(), x)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [..., D] of codes [..., D] with scales [...], rounded once.

    Every type represents codes exactly, and the types that the product is computed in represent
    scales exactly.
    """
    return (codes.to(dtype) * scales[..., None]).to(dtype)


def store_codes(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: KVLayer,
    slots: torch.Tensor,
    kept: slice | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize key, value [T, KVH, D], store the tokens `kept`, and return the cached values."""
    slots = slots[kept]
    fixed = kv.fixed_scales or (None, None)
    stored = []
    for x, cache, scale_cache, scale in (
        (key, kv.k_cache, kv.k_scales, fixed[0]),
        (value, kv.v_cache, kv.v_scales, fixed[1]),
    ):
        assert scale_cache is not None
        codes, scales = quantize(x, scale)
        stored.append(dequantize(codes, scales, x.dtype))
        if not kv.is_empty:
            block_size = cache.shape[1]
            cache.view(torch.uint8).flatten(0, 1)[slots] = codes[kept].view(torch.uint8)
            scale_cache[slots // block_size, :, slots % block_size] = scales[kept]
    return stored[0], stored[1]
