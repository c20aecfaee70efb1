"""Drawing of what min_p, top_k and top_p leave, as a Triton kernel: a program for each row.

The twin is `cuts.draw`, and what is left is what `cuts.cut` leaves, but for rounding. Nothing waits
for the device, and nothing is sorted: a program looks at its row until it knows enough.

1. The largest logit, and those of lanes, each of which sees every LANES-th token: the k-th largest
   of them is at most the k-th largest logit. So a top_k leaves nothing below it, mostly to a token.
2. Only where a share, top_p, is to be taken of what top_k leaves: search for the k-th largest.
3. All tokens race that neither min_p nor that bound leaves out. Who wins is looked at.
4. If the tokens before it are too many, or have too much mass, it is left out, and so is all that
   comes after it. Those before it race on, until one is kept. `cuts` says why that is a draw.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.cuts import Cuts
from nanovllm.kernels.sample import _log_exponential

LANES = 4096  # tokens that a program looks at together
WARPS = 16
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754944e-38)


@triton.jit
def _load(row_ptr, ids, size):  # type: ignore[no-untyped-def]
    """Logits in float32; minus infinity for what is no number or no token."""
    x = tl.load(row_ptr + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


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
def _tops(row_ptr, size, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of each lane."""
    n = tl.arange(0, LANES)
    tops = tl.full([LANES], -float("inf"), tl.float32)
    for start in range(0, size, LANES):
        tops = tl.maximum(tops, _load(row_ptr, start + n, size))
    return tops


@triton.jit
def _least_of_lanes(tops, k):  # type: ignore[no-untyped-def]
    """At most the `k`-th largest of `tops`, and mostly that one."""
    low = _order(tl.min(tops, axis=0))
    high = _order(tl.max(tops, axis=0)) + 1
    number = k + 1
    while (number != k) & (high - low > 1):
        middle = low + (high - low) // 2
        inside = tl.sum((tops >= _value(middle)).to(tl.int32), axis=0)
        if inside >= k:
            low = middle
            number = inside
        else:
            high = middle
    return _value(low)


@triton.jit
def _count3(row_ptr, size, a, b, c, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many logits are at least `a`, `b` and `c`."""
    n = tl.arange(0, LANES)
    num_a = tl.zeros([LANES], tl.int32)
    num_b = tl.zeros([LANES], tl.int32)
    num_c = tl.zeros([LANES], tl.int32)
    for start in range(0, size, LANES):
        x = _load(row_ptr, start + n, size)
        num_a += (x >= a).to(tl.int32)
        num_b += (x >= b).to(tl.int32)
        num_c += (x >= c).to(tl.int32)
    return tl.sum(num_a, axis=0), tl.sum(num_b, axis=0), tl.sum(num_c, axis=0)


@triton.jit
def _least_of_all(row_ptr, size, low, top, k, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A bound that just `k` logits reach, or else the `k`-th largest itself; `low` is too low.

    Each turn looks at three bounds, and leaves a quarter of the floats that it may be.
    """
    first = _order(low)
    last = _order(top) + 1
    number, _, _ = _count3(row_ptr, size, low, low, low, LANES)
    while (number > k) & (last - first > 1):
        quarter = (last - first) // 4
        b = first + (last - first) // 2
        a = b - quarter
        c = b + quarter
        num_a, num_b, num_c = _count3(row_ptr, size, _value(a), _value(b), _value(c), LANES)
        if num_c >= k:
            first, number = c, num_c
        elif num_b >= k:
            first, number, last = b, num_b, c
        elif num_a >= k:
            first, number, last = a, num_a, b
        else:
            last = a
    return _value(first), number


@triton.jit
def _race(  # type: ignore[no-untyped-def]
    row_ptr, size, key, temperature, top, least, value, token, LANES: tl.constexpr,
):  # fmt: skip
    """Of the tokens from `least` on and before `token`: who wins, how many they are, their mass.

    The winner is `size` if there is none. A token's mass is that of the largest logit at most, 1.
    """
    n = tl.arange(0, LANES)
    rate = LOG2E / temperature
    best = tl.full([LANES], -float("inf"), tl.float32)
    best_id = tl.full([LANES], 2147483647, tl.int32)
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for start in range(0, size, LANES):
        ids = start + n
        x = _load(row_ptr, ids, size)
        races = (x >= least) & _before(x, ids, value, token)
        score = tl.where(races, x - temperature * _log_exponential(key, ids), -float("inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, ids, best_id)
        mass += tl.where(races, tl.exp2((x - top) * rate), 0.0)
        number += races.to(tl.int32)
    first = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == first, best_id, 2147483647), axis=0)
    return tl.minimum(winner, size), tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _weigh(row_ptr, size, temperature, top, value, token, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens come before `token`, and their mass."""
    n = tl.arange(0, LANES)
    rate = LOG2E / temperature
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for start in range(0, size, LANES):
        ids = start + n
        x = _load(row_ptr, ids, size)
        before = _before(x, ids, value, token)
        mass += tl.where(before, tl.exp2((x - top) * rate), 0.0)
        number += before.to(tl.int32)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit(do_not_specialize=["has_min_p", "has_top_k", "has_top_p"])
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, keys_ptr, min_p_ptr, top_k_ptr, top_p_ptr, out_ptr,
    logits_stride, size, has_min_p, has_top_k, has_top_p, LANES: tl.constexpr,
):  # fmt: skip
    """One program draws a token of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    key = tl.load(keys_ptr + row)
    tops = _tops(row_ptr, size, LANES)
    top = tl.max(tops, axis=0)
    least = -float("inf")
    if has_min_p:
        least = top + temperature * tl.log(tl.load(min_p_ptr + row))
        least = tl.where(least == least, least, -float("inf"))
    k = size
    if has_top_k:
        k = tl.minimum(tl.load(top_k_ptr + row), size).to(tl.int32)
        if k < tl.minimum(size, LANES):
            least = tl.maximum(least, _least_of_lanes(tops, k))
    top_p = 1.0
    if has_top_p:
        top_p = tl.load(top_p_ptr + row)
    spare = 0
    if (k < size) & (top_p < 1.0):
        least, reach = _least_of_all(row_ptr, size, least, top, k, LANES)
        spare = tl.maximum(reach - k, 0)  # of those that are just as large as `least`
    winner, number, mass = _race(
        row_ptr, size, key, temperature, top, least, -float("inf"), size, LANES
    )
    enough = float("inf")
    if top_p < 1.0:
        if spare > 0:
            mass -= spare * tl.exp2((least - top) * (LOG2E / temperature))
        enough = tl.maximum(top_p * mass, TINY)
    again = ((number > k) | (top_p < 1.0)) & (winner < size)
    while again:
        value = _load(row_ptr, winner, size)
        number, before = _weigh(row_ptr, size, temperature, top, value, winner, LANES)
        again = (number >= k) | (before >= enough)
        if again:
            better, number, before = _race(
                row_ptr, size, key, temperature, top, least, value, winner, LANES
            )
            again = better < size
            winner = tl.where(again, better, winner)
    tl.store(out_ptr + row, tl.where(winner < size, winner, 0).to(tl.int64))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> torch.Tensor:
    """Token ids [R] for logits [R, V], as `cuts.draw` says, without waiting for the device."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = logits.new_empty(num_rows, dtype=torch.int64)
    columns = (cuts.min_p, cuts.top_k, cuts.top_p)
    _draw_kernel[(num_rows,)](
        logits, temperatures, keys, *(keys if x is None else x for x in columns), out,
        logits.stride(0), vocab_size, *(int(x is not None) for x in columns), LANES=LANES,
        num_warps=WARPS,
    )  # fmt: skip
    return out
