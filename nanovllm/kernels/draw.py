"""Drawing of what min_p, top_k and top_p leave, as a Triton kernel: a program for each row.

The twin is `cuts.draw`, and what is left is what `cuts.cut` leaves, but for rounding. Nothing is
sorted, and nothing waits for the device. All tokens race, and who wins is looked at. If the tokens
before it are too many, or have too much mass, it is left out, and so is all that comes after it.
Those before it race on, until one is kept. `cuts` says why that is a draw.

For that a row is looked at twice, mostly. Once for the race, in each of LANES lanes, which see
every LANES-th token: whose winner is left out, that lane alone races again. And once to weigh what
comes before the winner, and before the one that would win without it.

What top_k leaves is too little for a race of all. So the first look is for each lane's best two
tokens: whatever is larger than every lane's third is at hand then, and mostly that is all that may
be left. Else it says at least which tokens may race; and a few more looks find the k-th largest, if
top_p is a share of what top_k leaves.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.common import INTERPRETED
from nanovllm.kernels.cuts import Cuts
from nanovllm.kernels.sample import _log_exponential

LANES = 4096
WARPS = 16
UNROLL = tl.constexpr(4)  # loads of one turn come while another computes
NOTHING = tl.constexpr(-float("inf"))
NOBODY = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754944e-38)
TRIES = tl.constexpr(8)  # lanes that race again one by one, before all do
FEW = tl.constexpr(2)  # the same, where nothing is lost without an answer


@triton.jit
def _load(row_ptr, ids, size):  # type: ignore[no-untyped-def]
    """Logits in float32, minus infinity for what is no token."""
    return tl.load(row_ptr + ids, mask=ids < size, other=NOTHING).to(tl.float32)


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
def _above(value):  # type: ignore[no-untyped-def]
    """The next float."""
    return _value(_order(value) + 1)


@triton.jit
def _before(x, ids, value, token):  # type: ignore[no-untyped-def]
    """What comes before a token of that value: larger ones, and equal ones with lower ids."""
    return (x > value) | ((x == value) & (ids < token))


@triton.jit
def _weights(x, top, temperature):  # type: ignore[no-untyped-def]
    """Masses, that of the largest logit being 1; nothing for what is far below it."""
    x = (x - top) * (1.0 / temperature)
    return tl.exp(x) if INTERPRETED else libdevice.fast_expf(x)


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
def _three(a, b, c):  # type: ignore[no-untyped-def]
    """Three truths as one number, of which sums can be taken."""
    return a.to(tl.int64) + (b.to(tl.int64) << 20) + (c.to(tl.int64) << 40)


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
                reach += _three(x >= _value(a), x >= _value(b), x >= _value(c))
        else:
            reach = _three(x1 >= _value(a), x1 >= _value(b), x1 >= _value(c))
            reach += _three(x2 >= _value(a), x2 >= _value(b), x2 >= _value(c))
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
def _scores(x, ids, key, temperature):  # type: ignore[no-untyped-def]
    return x - temperature * _log_exponential(key, ids)


@triton.jit
def _race(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, least, value, token,
    AMONG_ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Who wins in each lane: of all tokens, or of those from `least` on and before `token`.

    Scores and ids, NOBODY where nobody races; and the largest logit.
    """
    n = tl.arange(0, LANES)
    best = tl.full([LANES], NOTHING, tl.float32)
    best_ids = tl.full([LANES], NOBODY, tl.int32)
    largest = best
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = _load(row_ptr, ids, size)
        largest = tl.maximum(largest, x)
        scores = _scores(x, ids, key, temperature)
        better = scores > best
        if not AMONG_ALL:
            better = better & (x >= least) & _before(x, ids, value, token)
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return best, best_ids, tl.max(largest, axis=0)


@triton.jit
def _first(score, token, other, other_token):  # type: ignore[no-untyped-def]
    """Of two tokens the one with the better score, or the lower id."""
    wins = (score > other) | ((score == other) & (token < other_token))
    return tl.where(wins, score, other), tl.where(wins, token, other_token)


@triton.jit
def _race_in_lane(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, scores, ids, loser, least, value, token,
    LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Let tokens of the loser's lane race, from `least` on and before `token`, for its place."""
    lane = loser % LANES
    others = lane + LANES * tl.arange(0, TURNS)
    x = _load(row_ptr, others, size)
    races = (x >= least) & _before(x, others, value, token)
    others_scores = tl.where(races, _scores(x, others, key, temperature), NOTHING)
    others = tl.where(others_scores > NOTHING, others, NOBODY)
    score, winner = tl.reduce((others_scores, others), 0, _first)
    here = tl.arange(0, LANES) == lane
    return tl.where(here, score, scores), tl.where(here, winner, ids)


@triton.jit
def _next(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, scores, ids, least, value, token,
    SURELY: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Who wins of the tokens from `least` on and before `token`, and its logit; or NOBODY.

    A lane whose winner is none of them races again. If that takes more than a few lanes, all race
    again where an answer is needed SURELY, and else there is none.
    """
    x = NOTHING
    winner = NOBODY
    tries = 0
    again = True
    while again:
        first, leader = tl.reduce((scores, ids), 0, _first)
        x = _load(row_ptr, leader, size)
        inside = (x >= least) & _before(x, leader, value, token)
        winner = tl.where(inside, leader, NOBODY)
        again = (first > NOTHING) & (winner == NOBODY) & (SURELY | (tries < FEW))
        if again:
            if tries < TRIES:
                scores, ids = _race_in_lane(
                    row_ptr, size, key, temperature, scores, ids, leader, least, value, token,
                    LANES, TURNS,
                )  # fmt: skip
            else:
                scores, ids, _ = _race(
                    row_ptr, size, key, temperature, least, value, token, False, LANES
                )
            tries += 1
    return scores, ids, x, winner


@triton.jit
def _weigh(row_ptr, size, temperature, top, least, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens there are from `least` on, and their mass."""
    n = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        x = _load(row_ptr, start + n, size)
        inside = x >= least
        mass += tl.where(inside, _weights(x, top, temperature), 0.0)
        number += inside.to(tl.int32)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _ties(row_ptr, size, value, token, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which tokens of that value come before `token` in its own turn."""
    ids = token // LANES * LANES + tl.arange(0, LANES)
    return (_load(row_ptr, ids, size) == value) & (ids < token)


@triton.jit
def _sums(a, b, c, more_a, more_b, more_c):  # type: ignore[no-untyped-def]
    return a + more_a, b + more_b, c + more_c


@triton.jit
def _weigh_before(  # type: ignore[no-untyped-def]
    row_ptr, size, temperature, top, least, value1, token1, value2, token2,
    COUNT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The mass from `least` on; that before each of two tokens; and with COUNT their numbers.

    All tokens of a turn have one bound: what ties with a token comes before it in the turns before
    its own, and not in those after it. Its own turn is looked at once more.
    """
    n = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float32)
    mass1, mass2 = mass, mass
    numbers = tl.zeros([LANES], tl.int32)  # 16 bits for each: a lane has not so many tokens
    above1, above2 = _above(value1), _above(value2)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        x = _load(row_ptr, start + n, size)
        weights = _weights(x, top, temperature)
        before1 = x >= tl.where(start + LANES <= token1, value1, above1)
        before2 = x >= tl.where(start + LANES <= token2, value2, above2)
        mass += tl.where(x >= least, weights, 0.0)
        mass1 += tl.where(before1, weights, 0.0)
        mass2 += tl.where(before2, weights, 0.0)
        if COUNT:
            numbers += tl.where(before1, 1, 0) + tl.where(before2, 1 << 16, 0)
    ties1 = _ties(row_ptr, size, value1, token1, LANES)
    ties2 = _ties(row_ptr, size, value2, token2, LANES)
    mass1 += tl.where(ties1, _weights(value1, top, temperature), 0.0)
    mass2 += tl.where(ties2, _weights(value2, top, temperature), 0.0)
    mass, mass1, mass2 = tl.reduce((mass, mass1, mass2), 0, _sums)
    number1, number2 = 0, 0
    if COUNT:
        numbers += tl.where(ties1, 1, 0) + tl.where(ties2, 1 << 16, 0)
        number1 = tl.sum(numbers & 0xFFFF, axis=0)
        number2 = tl.sum(numbers >> 16, axis=0)
    return mass, mass1, mass2, number1, number2


@triton.jit
def _enough(top_p, mass):  # type: ignore[no-untyped-def]
    """How much mass before a token leaves it out."""
    return tl.where(top_p < 1.0, tl.maximum(top_p * mass, TINY), -NOTHING)


@triton.jit
def _draw_at_hand(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
    number, third, k, top_p, LANES: tl.constexpr,
):  # fmt: skip
    """Draw from lanes' best that are `inside`, where no other token may be left."""
    weights1 = tl.where(inside1, _weights(x1, top, temperature), 0.0)
    weights2 = tl.where(inside2, _weights(x2, top, temperature), 0.0)
    mass = tl.sum(weights1 + weights2, axis=0)
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
    row_ptr, size, key, temperature, least, min_p_log, mass, k, top_p,
    HAS_K: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Draw from all tokens from `least` on, or from all, if there is no k.

    `mass` is what top_p is a share of, where that is known; else it is below 0.
    """
    value, token = NOTHING, size  # what comes from here on is left out
    scores, ids, top = _race(row_ptr, size, key, temperature, least, value, token, not HAS_K, LANES)
    least = tl.maximum(least, _least(top, temperature, min_p_log))
    winner = NOBODY
    again = True
    while again:
        scores, ids, value, token = _next(
            row_ptr, size, key, temperature, scores, ids, least, value, token, True, LANES, TURNS
        )
        winner = token
        again = (HAS_K | (top_p < 1.0)) & (winner != NOBODY)
        if again:  # weigh it, and who wins if it is left out
            scores, ids = _race_in_lane(
                row_ptr, size, key, temperature, scores, ids, token, least, value, token,
                LANES, TURNS,
            )  # fmt: skip
            scores, ids, other_value, other = _next(
                row_ptr, size, key, temperature, scores, ids, least, value, token, False,
                LANES, TURNS,
            )  # fmt: skip
            all_mass, before, before_other, number, number_other = _weigh_before(
                row_ptr, size, temperature, top, least, value, token, other_value, other,
                HAS_K, LANES,
            )  # fmt: skip
            enough = _enough(top_p, tl.where(mass < 0, all_mass, mass))
            again = (number >= k) | (before >= enough)
            if again & (other != NOBODY):
                winner, value, token = other, other_value, other
                again = (number_other >= k) | (before_other >= enough)
    return winner


@triton.jit
def _least(top, temperature, min_p_log):  # type: ignore[no-untyped-def]
    """The least logit that min_p leaves."""
    least = top + temperature * min_p_log
    return tl.where(least == least, least, NOTHING)


@triton.jit
def _draw_few(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, min_p_log, k, top_p, LANES: tl.constexpr, TURNS: tl.constexpr
):
    """Draw from what top_k leaves, and maybe the others as well."""
    x1, ids1, x2, ids2, x3 = _best_of_lanes(row_ptr, size, LANES)
    top = tl.max(x1, axis=0)
    least = _least(top, temperature, min_p_log)

    # At hand is what is larger than every lane's third. That is all that may be left if min_p
    # leaves nothing else, or there is nothing else, or it is as many as top_k leaves.
    third = tl.max(x3, axis=0)
    inside1 = (x1 > third) & (x1 >= least)
    inside2 = (x2 > third) & (x2 >= least)
    number = tl.sum(inside1.to(tl.int32) + inside2.to(tl.int32), axis=0)
    if (least > third) | (third == NOTHING) | (number >= k):
        winner = _draw_at_hand(
            row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
            number, third, k, top_p, LANES,
        )  # fmt: skip
    else:
        if k < tl.minimum(size, 2 * LANES):
            kth = _kth(row_ptr, size, x1, x2, tl.min(x2, axis=0), top, k, False, LANES)
            least = tl.maximum(least, kth)
        mass = -1.0
        if (k < size) & (top_p < 1.0):
            number, mass = _weigh(row_ptr, size, temperature, top, least, LANES)
            if number > k:
                least = _kth(row_ptr, size, x1, x2, least, top, k, True, LANES)
                above, mass = _weigh(row_ptr, size, temperature, top, _above(least), LANES)
                mass += (k - above) * _weights(least, top, temperature)
        winner = _draw_from_row(
            row_ptr, size, key, temperature, least, min_p_log, mass, k, top_p, True, LANES, TURNS
        )
    return winner


@triton.jit(do_not_specialize=["has_min_p", "has_top_p"])
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, min_p_ptr, top_k_ptr, top_p_ptr, out_ptr,
    logits_stride, size, has_min_p, has_top_p,
    HAS_TOP_K: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program draws a token of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    key = tl.load(keys_ptr + row)
    min_p_log = NOTHING
    if has_min_p:
        min_p_log = tl.log(tl.load(min_p_ptr + row))
    top_p = 1.0
    if has_top_p:
        top_p = tl.load(top_p_ptr + row)
    if HAS_TOP_K:
        k = tl.minimum(tl.load(top_k_ptr + row), size).to(tl.int32)
        winner = _draw_few(row_ptr, size, key, temperature, min_p_log, k, top_p, LANES, TURNS)
    else:
        winner = _draw_from_row(
            row_ptr, size, key, temperature, NOTHING, min_p_log, -1.0, size, top_p,
            False, LANES, TURNS,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.where(winner < size, winner, 0).to(tl.int64))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Token ids [R] for logits [R, V], as `cuts.draw` says, without waiting for the device."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert vocab_size < 1 << 20, "`_three` has 20 bits for each number"
    out = logits.new_empty(num_rows, dtype=torch.int64)
    columns = ((cuts.min_p, temperatures), (cuts.top_k, keys), (cuts.top_p, temperatures))
    _draw_kernel[(num_rows,)](
        logits, temperatures, keys, *(other if x is None else x for x, other in columns), out,
        logits.stride(0), vocab_size, int(cuts.min_p is not None), int(cuts.top_p is not None),
        HAS_TOP_K=cuts.top_k is not None, LANES=LANES,
        TURNS=triton.next_power_of_2(triton.cdiv(vocab_size, LANES)), num_warps=WARPS,
    )  # fmt: skip
    return out
