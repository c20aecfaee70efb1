"""Convert keys and values to e4m3 codes, with a scale for each head of a token, and back.

Codes are computed with integers, so that every GPU computes the same codes. They are read by the
GPU's own conversion if it has one.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.kv_layer import CODES, KVLayer
from nanovllm.kernels.plain import kv_codes

LARGEST = tl.constexpr(kv_codes.LARGEST)
SMALLEST_SCALE = tl.constexpr(kv_codes.SMALLEST_SCALE)


@triton.jit
def largest_of(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest absolute value of float32 x, or NaN if there is one, as its bits are larger."""
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=AXIS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest, fixed):  # type: ignore[no-untyped-def]
    """The scale of a head with this `largest` absolute value, or `fixed` if that is not 0.

    If a head has a NaN, its scale and so all its values are NaN, because not every kernel can read
    the code of NaN.
    """
    exact = tl.where(fixed > 0, fixed, tl.div_rn(largest, LARGEST))
    rounded_up = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = tl.maximum(rounded_up.to(tl.float32, bitcast=True), SMALLEST_SCALE)
    return tl.where(largest == largest, scale, largest)


@triton.jit
def codes_of(x, scale):  # type: ignore[no-untyped-def]
    """The codes of float32 x: the nearest of x / scale, ties to even; too large ones saturate."""
    quotient = tl.div_rn(x, scale)
    size = tl.minimum(tl.abs(quotient), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of the mantissa; the exponent of 1 is 7 instead of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Multiples of 2^-9, which is the last bit of floats from 2^14 on.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(quotient == quotient, code, 0x7F)  # the code of NaN
    return (code | ((quotient.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def as_float16(codes):  # type: ignore[no-untyped-def]
    """Codes times 2^-8 in float16, exactly: its exponent has one bit more."""
    wide = codes.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def values_of(codes, scale):  # type: ignore[no-untyped-def]
    """The values of codes, in float32."""
    return as_float16(codes).to(tl.float32) * 256.0 * scale


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels read it: with codes as bytes."""
    return cache.view(torch.uint8) if cache.dtype == CODES else cache


def as_pairs(cache: torch.Tensor) -> torch.Tensor:
    """A cache of codes [..., D] as pairs of neighbouring codes [..., D / 2]."""
    return cache.view(torch.int16)


def fixed_scales(kv: KVLayer) -> tuple[float, float]:
    """The fixed scales of keys and values; 0 if scales are computed."""
    return kv.fixed_scales or (0.0, 0.0)
