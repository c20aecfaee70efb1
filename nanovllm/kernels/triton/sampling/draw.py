"""Draw from the tokens that min_p, top_k and top_p keep: one program for each row.

Tokens are kept as in `plain/draw.py`, up to rounding. Nothing is sorted, and nothing syncs.
docs/sampling.md explains the race and the candidates.

Without top_k, most rows are read twice. The first pass races all tokens, and each of LANES lanes
keeps its winner. If a winner is removed, only its lane races again. The second pass adds up the
mass of the tokens before the winner, and of those before the next winner.

With top_k, a race of all tokens would mostly be won by removed tokens. So the first pass finds the
candidates, and most rows are drawn from these. For other rows, the candidates give a lower bound
for the race. If there is also a top_p, a few more passes find the k-th largest logit, because top_p
is a share of the mass that top_k keeps.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.cuts import Cuts
from nanovllm.kernels.triton.sampling.candidates import (
    LOWEST,
    NO_TOKEN,
    UNROLL,
    best_of_lanes,
    draw_from_candidates,
    enough_mass,
    kth_largest,
    largest_of,
    load_logits,
    next_float,
    weights_of,
)
from nanovllm.kernels.triton.sampling.infinite import checked, is_odd
from nanovllm.kernels.triton.sampling.race import next_winner, race, race_in_lane

LANES = 4096
WARPS = 16


@triton.jit
def _weigh(row_ptr, size, temperature, top, least, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of tokens from `least` on, and their mass."""
    n = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        x = load_logits(row_ptr, start + n, size)
        inside = x >= least
        mass += tl.where(inside, weights_of(x, top, temperature), 0.0)
        number += inside.to(tl.int32)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _count_odd(row_ptr, size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of logits that are NaN or infinite."""
    number = tl.zeros([LANES], tl.int32)
    for start in range(0, size, LANES):
        number += is_odd(load_logits(row_ptr, start + tl.arange(0, LANES), size))
    return tl.sum(number, axis=0)


@triton.jit
def _ties(row_ptr, size, value, token, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A mask of tokens equal to `value` that come before `token`, in its own turn of lanes."""
    ids = token // LANES * LANES + tl.arange(0, LANES)
    return (load_logits(row_ptr, ids, size) == value) & (ids < token)


@triton.jit
def _sums(a, b, c, more_a, more_b, more_c):  # type: ignore[no-untyped-def]
    return a + more_a, b + more_b, c + more_c


@triton.jit
def _weigh_before(  # type: ignore[no-untyped-def]
    row_ptr, size, temperature, top, least, value1, token1, value2, token2,
    COUNT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The mass from `least` on, the mass before each of two tokens; with COUNT, their numbers too.

    All tokens of a turn are compared with one bound: in earlier turns, tokens with an equal logit
    come before the token; in later turns, after it. The token's own turn is read once more.
    """
    n = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.float32)
    mass1, mass2 = mass, mass
    numbers = tl.zeros([LANES], tl.int32)  # 16 bits for each of two counts: enough for a lane
    above1, above2 = next_float(value1), next_float(value2)
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        x = load_logits(row_ptr, start + n, size)
        weights = weights_of(x, top, temperature)
        before1 = x >= tl.where(start + LANES <= token1, value1, above1)
        before2 = x >= tl.where(start + LANES <= token2, value2, above2)
        mass += tl.where(x >= least, weights, 0.0)
        mass1 += tl.where(before1, weights, 0.0)
        mass2 += tl.where(before2, weights, 0.0)
        if COUNT:
            numbers += tl.where(before1, 1, 0) + tl.where(before2, 1 << 16, 0)
    ties1 = _ties(row_ptr, size, value1, token1, LANES)
    ties2 = _ties(row_ptr, size, value2, token2, LANES)
    mass1 += tl.where(ties1, weights_of(value1, top, temperature), 0.0)
    mass2 += tl.where(ties2, weights_of(value2, top, temperature), 0.0)
    mass, mass1, mass2 = tl.reduce((mass, mass1, mass2), 0, _sums)
    number1, number2 = 0, 0
    if COUNT:
        numbers += tl.where(ties1, 1, 0) + tl.where(ties2, 1 << 16, 0)
        number1 = tl.sum(numbers & 0xFFFF, axis=0)
        number2 = tl.sum(numbers >> 16, axis=0)
    return mass, mass1, mass2, number1, number2


@triton.jit
def _draw_from_row(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, least, min_p_log, mass, k, top_p,
    HAS_K: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Draw from the tokens from `least` on, or from all tokens without a k.

    top_p is a share of `mass`, which is below 0 if it is not known yet. Also returns the largest
    logit, NaN if some logits are NaN.
    """
    value, token = LOWEST, size  # this token and those after it are removed
    scores, ids, top = race(row_ptr, size, key, temperature, least, value, token, not HAS_K, LANES)
    least = tl.maximum(least, _least(top, temperature, min_p_log))
    winner = NO_TOKEN
    again = True
    while again:
        scores, ids, value, token = next_winner(
            row_ptr, size, key, temperature, scores, ids, least, value, token, True, LANES, TURNS
        )
        winner = token
        again = (HAS_K | (top_p < 1.0)) & (winner != NO_TOKEN)
        if again:  # check this winner, and the next one
            scores, ids = race_in_lane(
                row_ptr, size, key, temperature, scores, ids, token, least, value, token,
                LANES, TURNS,
            )  # fmt: skip
            scores, ids, other_value, other = next_winner(
                row_ptr, size, key, temperature, scores, ids, least, value, token, False,
                LANES, TURNS,
            )  # fmt: skip
            all_mass, before, before_other, number, number_other = _weigh_before(
                row_ptr, size, temperature, top, least, value, token, other_value, other,
                HAS_K, LANES,
            )  # fmt: skip
            enough = enough_mass(top_p, tl.where(mass < 0, all_mass, mass))
            again = (number >= k) | (before >= enough)
            if again & (other != NO_TOKEN):
                winner, value, token = other, other_value, other
                again = (number_other >= k) | (before_other >= enough)
    return winner, top


@triton.jit
def _least(top, temperature, min_p_log):  # type: ignore[no-untyped-def]
    """The smallest logit that min_p keeps."""
    least = top + temperature * min_p_log
    return tl.where(least == least, least, LOWEST)


@triton.jit
def _draw_few(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, min_p_log, k, top_p, LANES: tl.constexpr, TURNS: tl.constexpr
):
    """Draw a token of a row with a top_k, and maybe other filters.

    Also returns the largest logit, NaN if some logits are NaN.
    """
    x1, ids1, x2, ids2, x3 = best_of_lanes(row_ptr, size, LANES)
    top = tl.max(x1, axis=0)
    largest = largest_of(x1, x3)
    x3 = tl.where(x3 == x3, x3, LOWEST)
    least = _least(top, temperature, min_p_log)

    # Candidates are larger than every lane's third best. No other token can be kept if min_p keeps
    # none, or if the row has none, or if there are at least k candidates.
    third = tl.max(x3, axis=0)
    inside1 = (x1 > third) & (x1 >= least)
    inside2 = (x2 > third) & (x2 >= least)
    number = tl.sum(inside1.to(tl.int32) + inside2.to(tl.int32), axis=0)
    if (least > third) | (third == LOWEST) | (number >= k):
        winner = draw_from_candidates(
            row_ptr, size, key, temperature, top, x1, ids1, x2, ids2, inside1, inside2,
            number, third, k, top_p, LANES,
        )  # fmt: skip
    else:
        if k < tl.minimum(size, 2 * LANES):
            kth = kth_largest(row_ptr, size, x1, x2, tl.min(x2, axis=0), top, k, False, LANES)
            least = tl.maximum(least, kth)
        mass = -1.0
        if (k < size) & (top_p < 1.0):
            number, mass = _weigh(row_ptr, size, temperature, top, least, LANES)
            if number > k:
                least = kth_largest(row_ptr, size, x1, x2, least, top, k, True, LANES)
                above, mass = _weigh(row_ptr, size, temperature, top, next_float(least), LANES)
                mass += (k - above) * weights_of(least, top, temperature)
        winner, _ = _draw_from_row(
            row_ptr, size, key, temperature, least, min_p_log, mass, k, top_p, True, LANES, TURNS
        )
    return winner, largest


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
    min_p_log = LOWEST
    if has_min_p:
        min_p_log = tl.log(tl.load(min_p_ptr + row))
    top_p = 1.0
    if has_top_p:
        top_p = tl.load(top_p_ptr + row)
    if HAS_TOP_K:
        k = tl.minimum(tl.load(top_k_ptr + row), size).to(tl.int32)
        winner, top = _draw_few(row_ptr, size, key, temperature, min_p_log, k, top_p, LANES, TURNS)
    else:
        winner, top = _draw_from_row(
            row_ptr, size, key, temperature, LOWEST, min_p_log, -1.0, size, top_p,
            False, LANES, TURNS,
        )  # fmt: skip
    if top == -LOWEST:  # rare
        top = checked(top, _count_odd(row_ptr, size, LANES))
    drawn = tl.where((top > LOWEST) & (winner < size), winner, -1)
    tl.store(out_ptr + row, drawn.to(tl.int64))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Token ids [R] for logits [R, V], as `plain/draw.py` draws them, without a sync."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert vocab_size < 1 << 20, "`_three` has 20 bits for each count"
    out = logits.new_empty(num_rows, dtype=torch.int64)
    columns = ((cuts.min_p, temperatures), (cuts.top_k, keys), (cuts.top_p, temperatures))
    _draw_kernel[(num_rows,)](
        logits, temperatures, keys, *(other if x is None else x for x, other in columns), out,
        logits.stride(0), vocab_size, int(cuts.min_p is not None), int(cuts.top_p is not None),
        HAS_TOP_K=cuts.top_k is not None, LANES=LANES,
        TURNS=next_power_of_2(cdiv(vocab_size, LANES)), num_warps=WARPS,
    )  # fmt: skip
    return out
