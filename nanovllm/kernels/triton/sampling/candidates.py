"""Draw from a row's candidates; functions that all draws share.

Lane n of LANES reads the tokens n, n + LANES, and so on, and remembers its two best. Of these
tokens, candidates are those that are larger than every lane's third best; so all other tokens of
the row are smaller. docs/sampling.md says when the filters can keep no other tokens.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.triton.common import INTERPRETED
from nanovllm.kernels.triton.sampling.noise import log_exponential

UNROLL = tl.constexpr(4)  # one turn's loads overlap with another's computation
LOWEST = tl.constexpr(-float("inf"))
NO_TOKEN = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def load_logits(row_ptr, ids, size):  # type: ignore[no-untyped-def]
    """Load logits in float32, with minus infinity for ids from `size` on."""
    return tl.load(row_ptr + ids, mask=ids < size, other=LOWEST).to(tl.float32)


@triton.jit
def as_integer(x):  # type: ignore[no-untyped-def]
    """Convert a float to an integer; the integers have the order of the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def as_float(order):  # type: ignore[no-untyped-def]
    """Convert an integer from `as_integer` back to the float."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_float(value):  # type: ignore[no-untyped-def]
    """The next larger float."""
    return as_float(as_integer(value) + 1)


@triton.jit
def comes_before(x, ids, value, token):  # type: ignore[no-untyped-def]
    """Which tokens come before `token`: larger than `value`, or equal and with a lower id."""
    return (x > value) | ((x == value) & (ids < token))


@triton.jit
def weights_of(x, top, temperature):  # type: ignore[no-untyped-def]
    """The masses of tokens, in units of the mass of the largest logit."""
    x = (x - top) * (1.0 / temperature)
    return tl.exp(x) if INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def enough_mass(top_p, mass):  # type: ignore[no-untyped-def]
    """If this mass comes before a token, top_p removes the token; infinite without a top_p."""
    return tl.where(top_p < 1.0, tl.maximum(top_p * mass, TINY), -LOWEST)


@triton.jit
def largest_of(x, y):  # type: ignore[no-untyped-def]
    """The largest of x; NaN if some of y are NaN."""
    return tl.where(tl.max((y != y).to(tl.int32), axis=0) > 0, float("nan"), tl.max(x, axis=0))


@triton.jit
def best_of_lanes(row_ptr, size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's best and second best values and ids, and its third best value.

    The third best value is NaN if some values are NaN.
    """
    n = tl.arange(0, LANES)
    x1 = tl.full([LANES], LOWEST, tl.float32)
    x2, x3 = x1, x1
    ids1 = tl.full([LANES], NO_TOKEN, tl.int32)
    ids2 = ids1
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = load_logits(row_ptr, ids, size)
        first, second = x > x1, x > x2
        x3 = tl.maximum(x3, tl.where(second, x2, x), propagate_nan=tl.PropagateNan.ALL)
        x2 = tl.where(first, x1, tl.where(second, x, x2))
        ids2 = tl.where(first, ids1, tl.where(second, ids, ids2))
        x1 = tl.where(first, x, x1)
        ids1 = tl.where(first, ids, ids1)
    return x1, ids1, x2, ids2, x3


@triton.jit
def _three(a, b, c):  # type: ignore[no-untyped-def]
    """Three booleans in one integer, 20 bits each, so that one sum counts all three."""
    return a.to(tl.int64) + (b.to(tl.int64) << 20) + (c.to(tl.int64) << 40)


@triton.jit
def kth_largest(  # type: ignore[no-untyped-def]
    row_ptr, size, x1, x2, low, top, k, IN_ROW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A bound that exactly k values reach, of a row or of the lanes' best; else the k-th largest
    value.

    At least `k` values reach `low`, and the bound is not below it. Each turn counts the values that
    reach three bounds, and leaves a quarter of the range of possible bounds.
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
def draw_from_candidates(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
    number, third, k, top_p, LANES: tl.constexpr,
):  # fmt: skip
    """Draw from the lanes' best tokens that are `inside`, if no other token can be kept."""
    weights1 = tl.where(inside1, weights_of(x1, top, temperature), 0.0)
    weights2 = tl.where(inside2, weights_of(x2, top, temperature), 0.0)
    mass = tl.sum(weights1 + weights2, axis=0)
    if (number > k) & (top_p < 1.0):  # top_p is a share of the mass of exactly k tokens
        kth = kth_largest(row_ptr, size, x1, x2, third, top, k, False, LANES)
        above1, above2 = inside1 & (x1 > kth), inside2 & (x2 > kth)
        above = tl.sum(above1.to(tl.int32) + above2.to(tl.int32), axis=0)
        some = tl.where(above1, weights1, 0.0) + tl.where(above2, weights2, 0.0)
        mass = tl.sum(some, axis=0) + (k - above) * weights_of(kth, top, temperature)
        inside1, inside2 = inside1 & (x1 >= kth), inside2 & (x2 >= kth)
    enough = enough_mass(top_p, mass)
    times1, times2 = log_exponential(key, ids1), log_exponential(key, ids2)
    scores1 = tl.where(inside1, x1 - temperature * times1, LOWEST)
    scores2 = tl.where(inside2, x2 - temperature * times2, LOWEST)
    winner = NO_TOKEN
    again = True
    while again:
        first = tl.max(tl.maximum(scores1, scores2), axis=0)
        places1, places2 = scores1 == first, scores2 == first
        ids = tl.minimum(tl.where(places1, ids1, NO_TOKEN), tl.where(places2, ids2, NO_TOKEN))
        winner = tl.min(ids, axis=0)
        value = load_logits(row_ptr, winner, size)
        before1 = inside1 & comes_before(x1, ids1, value, winner)
        before2 = inside2 & comes_before(x2, ids2, value, winner)
        number = tl.sum(before1.to(tl.int32) + before2.to(tl.int32), axis=0)
        some = tl.where(before1, weights1, 0.0) + tl.where(before2, weights2, 0.0)
        again = (number >= k) | (tl.sum(some, axis=0) >= enough)
        scores1 = tl.where(before1, scores1, LOWEST)
        scores2 = tl.where(before2, scores2, LOWEST)
    return winner
