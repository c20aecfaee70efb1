"""Drawing of what min_p, top_k and top_p leave, as a Triton kernel: a program for each row.

The twin is `cuts.draw`, and what is left is what `cuts.cut` leaves, but for rounding. Nothing is
sorted, and nothing waits for the device. A program looks at its row until it knows enough:

1. Once, for the best two tokens of each of LANES lanes, which see every LANES-th token. Whatever is
   larger than every lane's third is at hand then, and mostly that is all that may be left.
2. What may be left races, and who wins is looked at. If the tokens before it are too many, or have
   too much mass, it is left out, and so is all that comes after it. Those before it race on, until
   one is kept. `cuts` says why that is a draw.

Where all is at hand that takes no other look at the row, but one to know what top_p is a share of.
Else it is one for the race and one for each winner, whose lane alone has to race again; and a few
to find the k-th largest, if top_p is a share of what top_k leaves.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.cuts import Cuts
from nanovllm.kernels.sample import _log_exponential

LANES = 4096
WARPS = 16
UNROLL = tl.constexpr(2)  # loads of one turn come while another computes
LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-float("inf"))
NOBODY = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def _load(row_ptr, ids, size):  # type: ignore[no-untyped-def]
    """Logits in float32; minus infinity for what is no number or no token."""
    x = tl.load(row_ptr + ids, mask=ids < size, other=NOTHING).to(tl.float32)
    return tl.where(x == x, x, NOTHING)


@triton.jit
def _order(x):  # type: ignore[no-untyped-def]
    """An integer for a float: the larger, the larger. `_value` is the way back."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(order):  # type: ignore[no-untyped-def]
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _before(x, ids, value, token):  # type: ignore[no-untyped-def]
    """What comes before a token of that value: larger ones, and equal ones with lower ids."""
    return (x > value) | ((x == value) & (ids < token))


@triton.jit
def _weights(x, top, temperature):  # type: ignore[no-untyped-def]
    """Masses, that of the largest logit being 1."""
    return tl.exp2((x - top) * (LOG2E / temperature))


@triton.jit
def _best_of_lanes(row_ptr, size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's two best tokens: the first's values and ids, the second's; the third's values."""
    n = tl.arange(0, LANES)
    x1 = tl.full([LANES], NOTHING, tl.float32)
    x2, x3 = x1, x1
    ids1 = tl.full([LANES], NOBODY, tl.int32)
    ids2 = ids1
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = _load(row_ptr, ids, size)
        first, second = x > x1, x > x2
        x3 = tl.where(second, x2, tl.maximum(x3, x))
        x2 = tl.where(first, x1, tl.where(second, x, x2))
        ids2 = tl.where(first, ids1, tl.where(second, ids, ids2))
        x1 = tl.where(first, x, x1)
        ids1 = tl.where(first, ids, ids1)
    return x1, ids1, x2, ids2, x3


@triton.jit
def _reach(x, a, b, c):  # type: ignore[no-untyped-def]
    """Which reach `a`, `b` and `c`, as one number of which sums can be taken."""
    some = (x >= a).to(tl.int64) + ((x >= b).to(tl.int64) << 20)
    return some + ((x >= c).to(tl.int64) << 40)


@triton.jit
def _kth(  # type: ignore[no-untyped-def]
    row_ptr, size, x1, x2, low, top, k, IN_ROW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The k-th largest of a row, or of lanes' best, or less, if that leaves k; at least `low`.

    Each turn looks at three bounds, and leaves a quarter of the floats that it may be. At least
    `k` reach `low`.
    """
    first = _order(low)
    last = _order(top) + 1
    number = k + 1
    while (number != k) & (last - first > 1):
        quarter = (last - first) // 4
        b = first + (last - first) // 2
        a, c = b - quarter, b + quarter
        if IN_ROW:
            n = tl.arange(0, LANES)
            reach = tl.zeros([LANES], tl.int64)
            for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
                x = _load(row_ptr, start + n, size)
                reach += _reach(x, _value(a), _value(b), _value(c))
        else:
            reach = _reach(x1, _value(a), _value(b), _value(c))
            reach += _reach(x2, _value(a), _value(b), _value(c))
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
    return _value(first)


@triton.jit
def _scores(x, ids, key, temperature, least, value, token):  # type: ignore[no-untyped-def]
    """How tokens do in the race of those from `least` on and before `token`."""
    races = (x >= least) & _before(x, ids, value, token)
    return tl.where(races, x - temperature * _log_exponential(key, ids), NOTHING)


@triton.jit
def _race(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, least, LANES: tl.constexpr,
):  # fmt: skip
    """Who wins in each lane, of the tokens from `least` on: scores and ids, NOBODY for none."""
    n = tl.arange(0, LANES)
    best = tl.full([LANES], NOTHING, tl.float32)
    best_ids = tl.full([LANES], NOBODY, tl.int32)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = _load(row_ptr, ids, size)
        scores = _scores(x, ids, key, temperature, least, NOTHING, size)
        better = scores > best
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return best, best_ids


@triton.jit
def _race_in_lane(  # type: ignore[no-untyped-def]
    row_ptr, size, lane, key, temperature, least, value, token,
    LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Who wins of a lane's tokens from `least` on and before `token`: score and id."""
    ids = lane + LANES * tl.arange(0, TURNS)
    x = _load(row_ptr, ids, size)
    scores = _scores(x, ids, key, temperature, least, value, token)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where((scores == best) & (scores > NOTHING), ids, NOBODY), axis=0)


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    row_ptr, size, temperature, top, least, value, token, LANES: tl.constexpr,
):  # fmt: skip
    """How many tokens there are from `least` on and before `token`, and their mass."""
    n = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = _load(row_ptr, ids, size)
        inside = (x >= least) & _before(x, ids, value, token)
        mass += tl.where(inside, _weights(x, top, temperature), 0.0)
        number += inside.to(tl.int32)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _enough(top_p, mass):  # type: ignore[no-untyped-def]
    """How much mass before a token leaves it out."""
    return tl.where(top_p < 1.0, tl.maximum(top_p * mass, TINY), -NOTHING)


@triton.jit
def _draw_at_hand(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
    weights1, weights2, number, mass, third, k, top_p, LANES: tl.constexpr,
):  # fmt: skip
    """Draw from lanes' best that are `inside`, where no other token may be left."""
    if (number > k) & (top_p < 1.0):  # a share of what top_k leaves: of equal tokens some, maybe
        kth = _kth(row_ptr, size, x1, x2, third, top, k, False, LANES)
        above1, above2 = inside1 & (x1 > kth), inside2 & (x2 > kth)
        above = tl.sum(above1.to(tl.int32) + above2.to(tl.int32), axis=0)
        some = tl.where(above1, weights1, 0.0) + tl.where(above2, weights2, 0.0)
        mass = tl.sum(some, axis=0) + (k - above) * _weights(kth, top, temperature)
        inside1, inside2 = inside1 & (x1 >= kth), inside2 & (x2 >= kth)
    enough = _enough(top_p, mass)
    times1, times2 = _log_exponential(key, ids1), _log_exponential(key, ids2)
    scores1 = tl.where(inside1, x1 - temperature * times1, NOTHING)
    scores2 = tl.where(inside2, x2 - temperature * times2, NOTHING)
    winner = NOBODY
    again = True
    while again:
        first = tl.max(tl.maximum(scores1, scores2), axis=0)
        places1, places2 = scores1 == first, scores2 == first
        ids = tl.minimum(tl.where(places1, ids1, NOBODY), tl.where(places2, ids2, NOBODY))
        winner = tl.min(ids, axis=0)
        value = _load(row_ptr, winner, size)
        before1 = inside1 & _before(x1, ids1, value, winner)
        before2 = inside2 & _before(x2, ids2, value, winner)
        number = tl.sum(before1.to(tl.int32) + before2.to(tl.int32), axis=0)
        some = tl.where(before1, weights1, 0.0) + tl.where(before2, weights2, 0.0)
        again = (number >= k) | (tl.sum(some, axis=0) >= enough)
        scores1 = tl.where(before1, scores1, NOTHING)
        scores2 = tl.where(before2, scores2, NOTHING)
    return winner


@triton.jit
def _draw_from_row(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, x1, x2, least, mass, k, top_p,
    LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Draw from all tokens from `least` on."""
    if k < tl.minimum(size, 2 * LANES):
        kth = _kth(row_ptr, size, x1, x2, tl.min(x2, axis=0), top, k, False, LANES)
        least = tl.maximum(least, kth)
    if (k < size) & (top_p < 1.0):
        number, mass = _weigh(row_ptr, size, temperature, top, least, NOTHING, size, LANES)
        if number > k:
            least = _kth(row_ptr, size, x1, x2, least, top, k, True, LANES)
            above, mass = _weigh(row_ptr, size, temperature, top, least, least, 0, LANES)
            mass += (k - above) * _weights(least, top, temperature)
    enough = _enough(top_p, mass)
    limited = (k < size) | (top_p < 1.0)
    scores, ids = _race(row_ptr, size, key, temperature, least, LANES)
    value, token = NOTHING, size  # what comes from here on is left out
    winner = NOBODY
    again = True
    while again:
        first = tl.max(scores, axis=0)
        winner = tl.min(tl.where(scores == first, ids, NOBODY), axis=0)
        x = _load(row_ptr, winner, size)
        again = limited & (first > NOTHING)
        if again & _before(x, winner, value, token):
            number, before = _weigh(row_ptr, size, temperature, top, least, x, winner, LANES)
            again = (number >= k) | (before >= enough)
            value, token = x, winner
        if again:  # somebody else wins in its lane
            lane = winner % LANES
            score, other = _race_in_lane(
                row_ptr, size, lane, key, temperature, least, value, token, LANES, TURNS
            )
            here = tl.arange(0, LANES) == lane
            scores = tl.where(here, score, scores)
            ids = tl.where(here, other, ids)
    return winner


@triton.jit(do_not_specialize=["has_min_p", "has_top_k", "has_top_p"])
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, min_p_ptr, top_k_ptr, top_p_ptr, out_ptr,
    logits_stride, size, has_min_p, has_top_k, has_top_p,
    LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program draws a token of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    key = tl.load(keys_ptr + row)
    x1, ids1, x2, ids2, x3 = _best_of_lanes(row_ptr, size, LANES)
    top = tl.max(x1, axis=0)

    least = NOTHING
    if has_min_p:
        least = top + temperature * tl.log(tl.load(min_p_ptr + row))
        least = tl.where(least == least, least, NOTHING)
    k = size
    if has_top_k:
        k = tl.minimum(tl.load(top_k_ptr + row), size).to(tl.int32)
    top_p = 1.0
    if has_top_p:
        top_p = tl.load(top_p_ptr + row)

    # At hand is what is larger than every lane's third. That is all that may be left if min_p
    # leaves nothing else, or there is nothing else, or it is as many as top_k leaves, or has the
    # share of the mass that top_p leaves.
    third = tl.max(x3, axis=0)
    inside1 = (x1 > third) & (x1 >= least)
    inside2 = (x2 > third) & (x2 >= least)
    number = tl.sum(inside1.to(tl.int32) + inside2.to(tl.int32), axis=0)
    weights1 = tl.where(inside1, _weights(x1, top, temperature), 0.0)
    weights2 = tl.where(inside2, _weights(x2, top, temperature), 0.0)
    mass = tl.sum(weights1 + weights2, axis=0)
    at_hand = (least > third) | (third == NOTHING) | (number >= k)
    if (not at_hand) & (k == size) & (top_p < 1.0):
        known = mass
        _, mass = _weigh(row_ptr, size, temperature, top, least, NOTHING, size, LANES)
        at_hand = known >= tl.maximum(top_p * mass, TINY)

    if at_hand:
        winner = _draw_at_hand(
            row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
            weights1, weights2, number, mass, third, k, top_p, LANES,
        )  # fmt: skip
    else:
        winner = _draw_from_row(
            row_ptr, size, key, temperature, top, x1, x2, least, mass, k, top_p, LANES, TURNS
        )
    tl.store(out_ptr + row, tl.where(winner < size, winner, 0).to(tl.int64))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Token ids [R] for logits [R, V], as `cuts.draw` says, without waiting for the device."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert vocab_size < 1 << 20, "`_reach` counts in 20 bits"
    out = logits.new_empty(num_rows, dtype=torch.int64)
    columns = ((cuts.min_p, temperatures), (cuts.top_k, keys), (cuts.top_p, temperatures))
    _draw_kernel[(num_rows,)](
        logits, temperatures, keys, *(other if x is None else x for x, other in columns), out,
        logits.stride(0), vocab_size, *(int(x is not None) for x, _ in columns), LANES=LANES,
        TURNS=triton.next_power_of_2(triton.cdiv(vocab_size, LANES)), num_warps=WARPS,
    )  # fmt: skip
    return out
