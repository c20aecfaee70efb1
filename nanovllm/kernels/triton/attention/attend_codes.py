"""One tile of attention over e4m3 codes. N keys of a tile, D head dimension, G queries.

A tile of codes is read as 16-bit pairs [N, D / 2] of neighbouring columns. Few instructions convert
them to float16, exactly: one tile with the even columns, and one with the odd columns.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.kv_codes import as_float16
from nanovllm.kernels.triton.common import INTERPRETED, dot

# Bytes b3 b2 b1 b0 of $2 become b2 b0 in $0, b3 b1 in $1.
CONVERT = tl.constexpr(
    """{ .reg .b32 p; .reg .b16 a, b;
    prmt.b32 p, $2, 0, 0x3120;
    mov.b32 {a, b}, p;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b; }"""
)
SHIFT = tl.constexpr(
    """{ .reg .b32 a, b;
    shl.b32 a, $2, 7;
    shl.b32 b, $2, 8;
    and.b32 a, a, 0x3f803f80;
    lop3.b32 $0, b, 0x80008000, a, 0xea;
    shr.b32 a, $2, 1;
    and.b32 a, a, 0x3f803f80;
    lop3.b32 $1, $2, 0x80008000, a, 0xea; }"""
)  # exponent and mantissa in their places, times 2^8

# The largest weights are 2 to this power, so that float16 represents small ones, too.
ROOM = tl.constexpr(15.0)


@triton.jit
def halves(pairs, CONVERTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even and the odd codes of pairs, in float16; times 2^-8 unless CONVERTED."""
    if INTERPRETED:
        even, odd = as_float16(pairs), as_float16(pairs >> 8)
    elif CONVERTED:
        even, odd = tl.inline_asm_elementwise(
            CONVERT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            SHIFT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def factor_of_codes(CONVERTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor that the results of `halves` lack."""
    return 1.0 if CONVERTED and not INTERPRETED else 256.0


@triton.jit
def halves_of_queries(  # type: ignore[no-untyped-def]
    q_at, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, CONVERTED: tl.constexpr
):  # fmt: skip
    """The even and the odd columns [D / 2, G] of queries at `q_at` [G], and the factor of scores.

    They are multiplied by a power of two, so that the largest is between 2^14 and 2^15: then
    float16 represents all bfloat16 values that matter exactly.
    """
    pair = tl.arange(0, BLOCK_D // 2)
    real = inside[None, :] & (pair < D // 2)[:, None]
    q_at = q_at[None, :] + 2 * pair[:, None]
    even = tl.load(q_at, mask=real, other=0.0)
    odd = tl.load(q_at + 1, mask=real, other=0.0)
    factor = factor_of_codes(CONVERTED)
    if even.dtype != tl.float32:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0), axis=0)
        power = tl.minimum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
        even = (even * inverse * 16384.0).to(tl.float16)
        odd = (odd * inverse * 16384.0).to(tl.float16)
        factor *= power.to(tl.float32, bitcast=True) / 16384.0
    return even, odd, factor


@triton.jit
def log2(x):  # type: ignore[no-untyped-def]
    """log2 of normal x > 0, in one instruction, with a relative error of 2^-22."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x for normal x, in one instruction, with an error of an ulp."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def with_room(top, total):  # type: ignore[no-untyped-def]
    """The same sums of weights `total`, in units of 2^top, in the units of `attend_codes`."""
    return top - ROOM, total * 32768.0  # 2^ROOM


@triton.jit
def attend_codes(  # type: ignore[no-untyped-def]
    q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total, even, odd,
    MASKED: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """One tile of online softmax: fold pairs k, v [N, D / 2] into (top, total, even, odd).

    Codes are the first operand of the products: groups of up to 8 queries then fill a tile of the
    tensor cores. So q_even, q_odd, even and odd are [D / 2, G], and `visible` is [N, 1] or [N, G].

    A weight is multiplied by its value's scale in the exponent. So weights are relative to the
    largest product, and float16 represents them with 11 bits down to 2^-29 of it. The scale is
    divided out of `total`, in float32.
    """
    k_even, k_odd = halves(k, CONVERTED)
    v_even, v_odd = halves(v, CONVERTED)
    if q_even.dtype == tl.float32:
        k_even, k_odd = k_even.to(tl.float32), k_odd.to(tl.float32)
        v_even, v_odd = v_even.to(tl.float32), v_odd.to(tl.float32)
    v_scale = v_scale.to(tl.float32)
    k_scale = k_scale.to(tl.float32) * factor
    scores = dot(k_odd, q_odd, dot(k_even, q_even))
    scores = scores * k_scale[:, None] + log2(v_scale)[:, None]
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0) - ROOM)
    weights = tl.exp2(scores - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights * reciprocal(v_scale)[:, None], axis=0)
    weights = weights.to(v_even.dtype)
    even = dot(tl.trans(v_even), weights, even * shrink[None, :])
    odd = dot(tl.trans(v_odd), weights, odd * shrink[None, :])
    return new_top, total, even, odd


@triton.jit
def interleave(even, odd, CONVERTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of `attend_codes` as [G, D], times the factor that `halves` leaves out."""
    return tl.interleave(tl.trans(even), tl.trans(odd)) * factor_of_codes(CONVERTED)
