"""Attention in one order of sums: what a query gets does not depend on how a step was divided.

Keys are divided at multiples of CHUNK, from a context's first key on. The sums of a chunk begin
with nothing, and its tiles of BLOCK_N keys are added in order. A query's sums are those of its sink
or nothing, to which its finished chunks are added in order. Tiles and chunks that a query does not
see change no bit of its sums, and may be left out. So decode and prefill get equal bits.

- Products add groups of 16 numbers in order, whatever the tile's shape.
- Weights are added as integers, which have no order. `max` has none either.
- Each fused multiply-add is written as one, and kernels are launched with UNFUSED: else the
  compiler may fuse an addition in one kernel, and not in the other.

Sums are (top, total, even, odd): the largest score, the sum of the weights, and the weighted sum of
values [M, D]. With CODES it is in two parts, [D / 2, M] of the even and of the odd columns, as in
`attend_codes`; else `odd` is a number that is not used.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.attend_codes import (
    ROOM,
    factor_of_codes,
    halves,
    log2,
    reciprocal,
)
from nanovllm.kernels.triton.attention.queries import NONE, load_sinks
from nanovllm.kernels.triton.common import dot

CHUNK = 256  # keys: a multiple of TILE
UNFUSED = {"enable_fp_fusion": False}  # options of a launch


@triton.jit
def fma(x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z, rounded once. y and z may be numbers, or broadcast to the shape of x."""
    return tl.fma(x, tl.broadcast_to(y, x.shape), tl.broadcast_to(z, x.shape))


@triton.jit
def sum_of(weights, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of up to 128 weights between 0 and 2, in units of 2^-22.

    Numbers from 1 to 2 have equal exponents: their bits count units of 2^-23.
    """
    half = tl.full([], 0.5, tl.float32)
    one = tl.full([], 1.0, tl.float32)
    units = fma(weights, half, one).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(units, axis=AXIS).to(tl.float32) * 2.384185791015625e-07


@triton.jit
def sum_of_any(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of up to 128 numbers of any size that are not negative, as `sum_of` those below 1."""
    # The power of two above the largest one.
    largest = tl.max(x, axis=AXIS).to(tl.int32, bitcast=True)
    power = tl.minimum(tl.maximum((largest & 0x7F800000) + (1 << 23), 1 << 23), 253 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return sum_of(x * tl.expand_dims(inverse, AXIS), AXIS) * power.to(tl.float32, bitcast=True)


@triton.jit
def none_yet(M: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of M queries over no keys. A chunk begins with them."""
    top = tl.full([M], NONE, tl.float32)
    total = tl.zeros([M], tl.float32)
    if CODES:
        even = tl.zeros([D // 2, M], tl.float32)
        odd = even
    else:
        even = tl.zeros([M, D], tl.float32)
        odd = 0.0
    return top, total, even, odd


@triton.jit
def first_sums(  # type: ignore[no-untyped-def]
    sinks_ptr, head, real, M: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """The sums of M queries before their first chunk: of their heads' sinks, or of nothing."""
    top, total, even, odd = none_yet(M, D, CODES)
    if sinks_ptr is not None:
        top = load_sinks(sinks_ptr, head, real)
        if CODES:
            top -= ROOM
        total += 32768.0 if CODES else 1.0  # 2^ROOM
    return top, total, even, odd


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    q, k, v, visible, scale_log2, top, total, acc, MASKED: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Add keys k [N, D] with values v [N, D] to a chunk's sums. As `attend`, in a fixed order."""
    scores = dot(q, tl.trans(k))
    factor = scale_log2
    if CAP > 0:
        shrunk = tl.exp2(tl.abs(scores) * scale_log2 * (-2.8853900817779268 / CAP))
        capped = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -capped, capped)
        factor = tl.full([], CAP, tl.float32)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(fma(scores, factor, -new_top[:, None]))
    shrink = tl.exp2(top - new_top)
    total = fma(total, shrink, sum_of(weights, 1))
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def fold_codes(  # type: ignore[no-untyped-def]
    q_even, q_odd, k, v, k_scale, v_scale, factor, visible, top, total, even, odd,
    MASKED: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """Add pairs k, v [N, D / 2] to a chunk's sums. As `attend_codes`, with a factor [M]."""
    k_even, k_odd = halves(k, CONVERTED)
    v_even, v_odd = halves(v, CONVERTED)
    if q_even.dtype == tl.float32:
        k_even, k_odd = k_even.to(tl.float32), k_odd.to(tl.float32)
        v_even, v_odd = v_even.to(tl.float32), v_odd.to(tl.float32)
    v_scale = v_scale.to(tl.float32)
    scores = dot(k_odd, q_odd, dot(k_even, q_even)) * factor[None, :]
    scores = fma(scores, k_scale.to(tl.float32)[:, None], log2(v_scale)[:, None])
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0) - ROOM)
    weights = tl.exp2(scores - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = fma(total, shrink, sum_of_any(weights * reciprocal(v_scale)[:, None], 0))
    weights = weights.to(v_even.dtype)
    even = dot(tl.trans(v_even), weights, even * shrink[None, :])
    odd = dot(tl.trans(v_odd), weights, odd * shrink[None, :])
    return new_top, total, even, odd


@triton.jit
def add_chunk(  # type: ignore[no-untyped-def]
    all_top, all_total, all_even, all_odd, top, total, even, odd, CODES: tl.constexpr
):  # fmt: skip
    """Add the sums of a finished chunk to those of the chunks before it."""
    new_top = tl.maximum(all_top, top)
    keep = tl.exp2(all_top - new_top)
    share = tl.exp2(top - new_top)
    all_total = fma(all_total, keep, total * share)
    if CODES:
        all_even = fma(all_even, keep[None, :], even * share[None, :])
        all_odd = fma(all_odd, keep[None, :], odd * share[None, :])
    else:
        all_even = fma(all_even, keep[:, None], even * share[:, None])
    return new_top, all_total, all_even, all_odd


@triton.jit
def columns(even, odd, CODES: tl.constexpr, CONVERTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weighted sum of values as [M, D]."""
    if CODES:
        acc = tl.interleave(tl.trans(even), tl.trans(odd)) * factor_of_codes(CONVERTED)
    else:
        acc = even
    return acc


@triton.jit
def quotient(acc, total):  # type: ignore[no-untyped-def]
    """The output of queries; zeros for those without keys. A zero is never -0."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None] + 0.0


@triton.jit
def halves_of_query(  # type: ignore[no-untyped-def]
    q_at, inside, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, CONVERTED: tl.constexpr
):  # fmt: skip
    """As `halves_of_queries`, each query with a power and a factor [M] of its own.

    The factor includes that of scores.
    """
    pair = tl.arange(0, BLOCK_D // 2)
    real = inside[None, :] & (pair < D // 2)[:, None]
    q_at = q_at[None, :] + 2 * pair[:, None]
    even = tl.load(q_at, mask=real, other=0.0)
    odd = tl.load(q_at + 1, mask=real, other=0.0)
    factor = tl.full([inside.shape[0]], factor_of_codes(CONVERTED), tl.float32) * scale_log2
    if even.dtype != tl.float32:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0)
        power = tl.minimum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 253 << 23)
        inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)[None, :]
        even = (even * inverse * 16384.0).to(tl.float16)
        odd = (odd * inverse * 16384.0).to(tl.float16)
        factor *= power.to(tl.float32, bitcast=True) / 16384.0
    return even, odd, factor
