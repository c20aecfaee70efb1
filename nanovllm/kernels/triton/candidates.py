"""The draw of what is at hand, where that is all that may be left; and what all draws share.

At hand are each lane's best two tokens, as far as they are larger than every lane's third. Lane n
of LANES has every LANES-th token, from token n on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.triton.common import INTERPRETED
from nanovllm.kernels.triton.noise import log_exponential

UNROLL = tl.constexpr(4)  # loads of one turn come while another computes
NOTHING = tl.constexpr(-float("inf"))
NOBODY = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def load_logits(row_ptr, ids, size):  # type: ignore[no-untyped-def]
    """Logits in float32, minus infinity for what is no token."""
    return tl.load(row_ptr + ids, mask=ids < size, other=NOTHING).to(tl.float32)


@triton.jit
def as_integer(x):  # type: ignore[no-untyped-def]
    """An integer for a float: the larger, the larger."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def as_float(order):  # type: ignore[no-untyped-def]
    """The float of an integer from `as_integer`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_float(value):  # type: ignore[no-untyped-def]
    """The next float."""
    return as_float(as_integer(value) + 1)


@triton.jit
def comes_before(x, ids, value, token):  # type: ignore[no-untyped-def]
    """What comes before a token of that value: larger ones, and equal ones with lower ids."""
    return (x > value) | ((x == value) & (ids < token))


@triton.jit
def weights_of(x, top, temperature):  # type: ignore[no-untyped-def]
    """Masses, that of the largest logit being 1; nothing for what is far below it."""
    x = (x - top) * (1.0 / temperature)
    return tl.exp(x) if INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def enough_mass(top_p, mass):  # type: ignore[no-untyped-def]
    """How much mass before a token leaves it out."""
    return tl.where(top_p < 1.0, tl.maximum(top_p * mass, TINY), -NOTHING)


@triton.jit
def best_of_lanes(row_ptr, size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's two best tokens: the first's values and ids, the second's; the third's values."""
    n = tl.arange(0, LANES)
    x1 = tl.full([LANES], NOTHING, tl.float32)
    x2, x3 = x1, x1
    ids1 = tl.full([LANES], NOBODY, tl.int32)
    ids2 = ids1
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = load_logits(row_ptr, ids, size)
        first, second = x > x1, x > x2
        x3 = tl.where(second, x2, tl.maximum(x3, x))
        x2 = tl.where(first, x1, tl.where(second, x, x2))
        ids2 = tl.where(first, ids1, tl.where(second, ids, ids2))
        x1 = tl.where(first, x, x1)
        ids1 = tl.where(first, ids, ids1)
    return x1, ids1, x2, ids2, x3


@triton.jit
def _three(a, b, c):  # type: ignore[no-untyped-def]
    """Three truths as one number, of which sums can be taken."""
    return a.to(tl.int64) + (b.to(tl.int64) << 20) + (c.to(tl.int64) << 40)


@triton.jit
def kth_largest(  # type: ignore[no-untyped-def]
    row_ptr, size, x1, x2, low, top, k, IN_ROW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The k-th largest of a row, or of lanes' best, or less, if that leaves k; at least `low`.

    Each turn looks at three bounds, and leaves a quarter of the floats that it may be. At least
    `k` reach `low`.
    """
    first = as_integer(low)
    last = as_integer(top) + 1
    number = k + 1
    while (number != k) & (last - first > 1):
        quarter = (last - first) // 4
        b = first + (last - first) // 2
        a, c = b - quarter, b + quarter
        if IN_ROW:
            n = tl.arange(0, LANES)
            reach = tl.zeros([LANES], tl.int64)
            for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
                x = load_logits(row_ptr, start + n, size)
                reach += _three(x >= as_float(a), x >= as_float(b), x >= as_float(c))
        else:
            reach = _three(x1 >= as_float(a), x1 >= as_float(b), x1 >= as_float(c))
            reach += _three(x2 >= as_float(a), x2 >= as_float(b), x2 >= as_float(c))
        numbers = tl.sum(reach, axis=0)
        num_a = (numbers & 0xFFFFF).to(tl.int32)
        num_b = ((numbers >> 20) & 0xFFFFF).to(tl.int32)
        num_c = (numbers >> 40).to(tl.int32)
        if num_c >= k:
            first, number = c, num_c
        elif num_b >= k:
            first, number, last = b, num_b, c
        elif num_a >= k:
            first, number, last = a, num_a, b
        else:
            last = a
    return as_float(first)


@triton.jit
def draw_at_hand(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
    number, third, k, top_p, LANES: tl.constexpr,
):  # fmt: skip
    """Draw from lanes' best that are `inside`, where no other token may be left."""
    weights1 = tl.where(inside1, weights_of(x1, top, temperature), 0.0)
    weights2 = tl.where(inside2, weights_of(x2, top, temperature), 0.0)
    mass = tl.sum(weights1 + weights2, axis=0)
    if (number > k) & (top_p < 1.0):  # a share of what top_k leaves: of equal tokens some, maybe
        kth = kth_largest(row_ptr, size, x1, x2, third, top, k, False, LANES)
        above1, above2 = inside1 & (x1 > kth), inside2 & (x2 > kth)
        above = tl.sum(above1.to(tl.int32) + above2.to(tl.int32), axis=0)
        some = tl.where(above1, weights1, 0.0) + tl.where(above2, weights2, 0.0)
        mass = tl.sum(some, axis=0) + (k - above) * weights_of(kth, top, temperature)
        inside1, inside2 = inside1 & (x1 >= kth), inside2 & (x2 >= kth)
    enough = enough_mass(top_p, mass)
    times1, times2 = log_exponential(key, ids1), log_exponential(key, ids2)
    scores1 = tl.where(inside1, x1 - temperature * times1, NOTHING)
    scores2 = tl.where(inside2, x2 - temperature * times2, NOTHING)
    winner = NOBODY
    again = True
    while again:
        first = tl.max(tl.maximum(scores1, scores2), axis=0)
        places1, places2 = scores1 == first, scores2 == first
        ids = tl.minimum(tl.where(places1, ids1, NOBODY), tl.where(places2, ids2, NOBODY))
        winner = tl.min(ids, axis=0)
        value = load_logits(row_ptr, winner, size)
        before1 = inside1 & comes_before(x1, ids1, value, winner)
        before2 = inside2 & comes_before(x2, ids2, value, winner)
        number = tl.sum(before1.to(tl.int32) + before2.to(tl.int32), axis=0)
        some = tl.where(before1, weights1, 0.0) + tl.where(before2, weights2, 0.0)
        again = (number >= k) | (tl.sum(some, axis=0) >= enough)
        scores1 = tl.where(before1, scores1, NOTHING)
        scores2 = tl.where(before2, scores2, NOTHING)
    return winner
