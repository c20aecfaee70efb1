"""Race a row's tokens in lanes: each lane's winner, the winner of all lanes, and the next one.

In a race are the tokens with a logit of at least `least` that come before `token` with logit
`value`. docs/sampling.md explains the race.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.sampling.candidates import (
    LOWEST,
    NO_TOKEN,
    UNROLL,
    comes_before,
    largest_of,
    load_logits,
)
from nanovllm.kernels.triton.sampling.noise import log_exponential

TRIES = tl.constexpr(8)  # lanes that race again one by one, before all lanes do
FEW = tl.constexpr(2)  # the same if a winner is not needed


@triton.jit
def _scores(x, ids, key, temperature):  # type: ignore[no-untyped-def]
    return x - temperature * log_exponential(key, ids)


@triton.jit
def race(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, least, value, token,
    AMONG_ALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each lane's winner: among all tokens, or among those from `least` on and before `token`.

    Returns scores and ids, NO_TOKEN for a lane without tokens in the race, and the largest logit,
    or NaN if some logits are NaN.
    """
    n = tl.arange(0, LANES)
    best = tl.full([LANES], LOWEST, tl.float32)
    best_ids = tl.full([LANES], NO_TOKEN, tl.int32)
    largest = best
    for start in tl.range(0, size, LANES, loop_unroll_factor=UNROLL):
        ids = start + n
        x = load_logits(row_ptr, ids, size)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        scores = _scores(x, ids, key, temperature)
        better = scores > best
        if not AMONG_ALL:
            better = better & (x >= least) & comes_before(x, ids, value, token)
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return best, best_ids, largest_of(largest, largest)


@triton.jit
def _first(score, token, other, other_token):  # type: ignore[no-untyped-def]
    """The token with the better of two scores; the lower id if scores are equal."""
    wins = (score > other) | ((score == other) & (token < other_token))
    return tl.where(wins, score, other), tl.where(wins, token, other_token)


@triton.jit
def race_in_lane(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, scores, ids, loser, least, value, token,
    LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Replace a lane's winner `loser` by the one from `least` on and before `token`."""
    lane = loser % LANES
    others = lane + LANES * tl.arange(0, TURNS)
    x = load_logits(row_ptr, others, size)
    races = (x >= least) & comes_before(x, others, value, token)
    others_scores = tl.where(races, _scores(x, others, key, temperature), LOWEST)
    others = tl.where(others_scores > LOWEST, others, NO_TOKEN)
    score, winner = tl.reduce((others_scores, others), 0, _first)
    here = tl.arange(0, LANES) == lane
    return tl.where(here, score, scores), tl.where(here, winner, ids)


@triton.jit
def next_winner(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, scores, ids, least, value, token,
    SURELY: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """The winner of the tokens from `least` on and before `token`, and its logit; or NO_TOKEN.

    If a lane's winner is not among these tokens, the lane races again. After a few lanes, all lanes
    race again if SURELY, or else there is no winner.
    """
    x = LOWEST
    winner = NO_TOKEN
    tries = 0
    again = True
    while again:
        first, leader = tl.reduce((scores, ids), 0, _first)
        x = load_logits(row_ptr, leader, size)
        inside = (x >= least) & comes_before(x, leader, value, token)
        winner = tl.where(inside, leader, NO_TOKEN)
        again = (first > LOWEST) & (winner == NO_TOKEN) & (SURELY | (tries < FEW))
        if again:
            if SURELY and tries >= TRIES:
                scores, ids, _ = race(
                    row_ptr, size, key, temperature, least, value, token, False, LANES
                )
            else:
                scores, ids = race_in_lane(
                    row_ptr, size, key, temperature, scores, ids, leader, least, value, token,
                    LANES, TURNS,
                )  # fmt: skip
            tries += 1
    return scores, ids, x, winner
