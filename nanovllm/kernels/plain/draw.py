"""Draw a token from those that min_p, top_k and top_p keep. R rows, V tokens.

`cut` defines which tokens are kept, by sorting. `draw` draws from them without sorting all tokens;
docs/sampling.md explains the method. A token comes before another if its logit is larger, or if
they are equal and its id is lower.
"""

import math
from collections.abc import Callable

import torch

from nanovllm.kernels.operands.cuts import BLOCK, Cuts
from nanovllm.kernels.plain.no_token import or_no_token
from nanovllm.kernels.plain.noise import GOLDEN, log_exponential
from nanovllm.kernels.plain.ranking import most_likely
from nanovllm.kernels.plain.sample import first_max

LOG2_E = 1 / math.log(2)
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}  # as for `sample`, with more bytes for each


def cut(logits: torch.Tensor, temperatures: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The logits [R, V] in float32, with minus infinity for removed tokens. Sorts all tokens."""
    values, ids = logits.float().sort(dim=1, descending=True, stable=True)
    values.masked_fill_(_left_out(values, temperatures[:, None], cuts), -torch.inf)
    return torch.empty_like(values).scatter_(1, ids, values)


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Token ids [R] for logits [R, V]: what `sample` draws from `cut`, up to rounding.

    Rows without a token are those of `sample`, before the cut.

    Temperatures are above 0. Syncs. Peak memory: about 30 bytes for each of CHUNK_ELEMENTS logits,
    50 if all tokens are candidates.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    spread, places = ids * GOLDEN, ids.float()  # exact up to 2^24
    step = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        x, some = logits[rows].float(), (temperatures[rows, None], keys[rows], cuts.of(rows))
        if cuts.num_candidates:
            drawn = _draw_from_candidates(x, *some)
        else:
            drawn = _draw_from_all(x, spread, places, *some)
        tokens[rows] = or_no_token(drawn, x, x.amax(dim=1))
    return tokens


def _draw_from_candidates(
    x: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Draw from the first tokens; their arrival times are the same as in a race of all tokens."""
    values, ids = most_likely(x, cuts.num_candidates)
    scores = log_exponential(keys, ids.int().mul_(GOLDEN)).mul_(-temperatures).add_(values)
    scores.masked_fill_(_left_out(values, temperatures, cuts), -torch.inf)
    return ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]


def _draw_from_all(
    x: torch.Tensor,
    spread: torch.Tensor,
    places: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    cuts: Cuts,
) -> torch.Tensor:
    """Race all tokens, then check whether the winner is kept; if not, race the tokens before it.

    With top_p alone, a draw takes 1 + log(1 / top_p) rounds on average. Masks are floats, 1 for a
    token that is in the race: comparisons write floats several times faster than booleans.
    """
    top = x.amax(dim=1, keepdim=True)
    scores = log_exponential(keys, spread).mul_(-temperatures).add_(x)
    inside = None
    if cuts.min_p is not None:
        inside = 1 - _compare(torch.lt, x, _least(top, temperatures, cuts.min_p))
        scores.sub_(_penalties(inside))
    if cuts.top_k is None and cuts.top_p is None:
        return first_max(scores)
    weights = (x - top).mul_(LOG2_E / temperatures).exp2_()  # exp is slow for small results
    if inside is not None:
        weights.mul_(inside)
    enough = _enough(_mass(weights), cuts.top_p)
    tokens = torch.empty(len(x), dtype=torch.long, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    while True:
        winners = first_max(scores)
        tokens[rows] = winners
        before = _before(x, places, winners[:, None])
        weights.mul_(before)
        left_out = _mass(weights) >= enough[rows]
        if cuts.top_k is not None:
            left_out |= before.sum(dim=1, keepdim=True) >= cuts.top_k[rows]
        again = left_out[:, 0].nonzero()[:, 0]
        if not len(again):
            return tokens
        if len(again) < len(rows):
            rows, x, scores, weights, before = (
                y[again] for y in (rows, x, scores, weights, before)
            )
        scores.sub_(_penalties(before))


def _left_out(values: torch.Tensor, temperatures: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Which of each row's first K tokens, `values` [R, K] in order, are left out.

    The first token is always kept, and comparisons with NaN leave nothing out.
    """
    top = values[:, :1]
    left_out = torch.zeros_like(values, dtype=torch.bool)
    if cuts.min_p is not None:
        left_out |= values < _least(top, temperatures, cuts.min_p)
    if cuts.top_k is not None:
        left_out |= torch.arange(values.shape[1], device=values.device) >= cuts.top_k
    if cuts.top_p is not None:
        weights = (values - top).div_(temperatures).exp_().masked_fill_(left_out, 0.0).double()
        before = weights.cumsum(dim=1) - weights
        left_out |= before >= _enough(weights.sum(dim=1, keepdim=True), cuts.top_p)
    return left_out


def _least(top: torch.Tensor, temperatures: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that min_p keeps."""
    return top + temperatures * min_p.log()


def _enough(mass: torch.Tensor, top_p: torch.Tensor | None) -> torch.Tensor:
    """If this mass comes before a token, top_p removes the token; above 0 to keep the first."""
    if top_p is None:
        return torch.full_like(mass, torch.inf)
    share = (top_p * mass).clamp_(min=torch.finfo(mass.dtype).tiny)
    return share.masked_fill_(top_p >= 1, torch.inf)


def _mass(weights: torch.Tensor) -> torch.Tensor:
    """The sums [R, 1] of rows [R, V] in float64; of blocks in float32 first, which is faster."""
    if weights.shape[1] % BLOCK == 0:
        weights = weights.view(len(weights), -1, BLOCK).sum(dim=2)
    return weights.sum(dim=1, keepdim=True, dtype=torch.double)


def _before(x: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A mask [R, V] of the tokens that come before `tokens` [R, 1].

    Up to the token's own place, these are the tokens with at least its value; after its place,
    those with at least the next larger float.
    """
    values = x.gather(1, tokens)
    above = values.nextafter(torch.full_like(values, torch.inf))
    bounds = _compare(torch.lt, places.expand_as(x), tokens.float())
    bounds.mul_(values - above).add_(above)
    return torch.ge(x, bounds, out=bounds)


def _compare(
    operator: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return operator(x, y, out=torch.empty(x.shape, device=x.device))


def _penalties(mask: torch.Tensor) -> torch.Tensor:
    """0 for a token that is in the mask, infinity for others."""
    return mask.reciprocal().sub_(1)
