"""The random numbers of sampling, defined once: the key of a draw, and each token's arrival time.

A draw is a race. Token i arrives at an exponentially distributed time with the rate exp(logit[i] /
temperature). The times are independent, so each token is the first to arrive with a probability
proportional to its rate: the first token is a draw from the softmax. With a standard exponential
number E, the time is E / rate: the first token to arrive is the one with the largest `logit -
temperature * log(E)`.

E is not random but a hash, so that a draw can be repeated anywhere. The key of a draw is XXH64 of
the sequence's length, with the request's seed. A token's E is a hash of the key and the token's
id. So a request's draws depend on its own seed, position and logits, never on its neighbours.

`kernels/triton/sampling/noise.py` and `kernels/cpu/noise.h` compute the same with these constants.
docs/sampling.md explains how filters are applied to the race.
"""

import torch

# The multipliers of XXH64, as int64.
PRIMES = (
    0x9E3779B185EBCA87 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64), 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63 - (1 << 64), 0x27D4EB2F165667C5,
)  # fmt: skip
TOP_BIT = -(1 << 63)  # makes a signed number from 64 unsigned bits: x ^ TOP_BIT is x - 2^63
GOLDEN = 0x9E3779B9 - (1 << 32)  # as an int32: spreads the token ids over 32 bits, one-to-one
MIXERS = (0x21F0AAAD, 0x735A2D97)  # the multipliers of the hash of key and token id
SHRINK = 2.0**-31 * (1 - 2.0**-23)  # |int32| * SHRINK + SMALLEST is in [2^-32, 1 - 2^-23]
SMALLEST = 2.0**-32


def noise_keys(seeds: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """The keys of draws: XXH64 of each `num_tokens` as eight bytes with its seed, minus 2^63.

    Seeds are int64. A sequence with `num_tokens` tokens draws its next token with this key.
    """
    p1, p2, p3, p4, p5 = PRIMES
    x = seeds + (p5 + 8)
    x = _rotate_left(x ^ (_rotate_left(num_tokens.long() * p2, 31) * p1), 27) * p1 + p4
    x = (x ^ _shift_right(x, 33)) * p2
    x = (x ^ _shift_right(x, 29)) * p3
    return x ^ _shift_right(x, 32) ^ TOP_BIT


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, and fill with zeros instead of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits) | _shift_right(x, 64 - bits)


def log_exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of standard exponential numbers [B, V] for keys [B] and `token id * GOLDEN` [V].

    The hash has two rounds of multiply and xor-shift over 32 bits; one half of the key is mixed in
    before each round. E is between 2^-32 and 16, so all logarithms are finite. Small times, which
    win races, keep their full precision.
    """
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    x = (ids ^ low).mul_(MIXERS[0])
    x.bitwise_xor_(x >> 15).add_(high).mul_(MIXERS[1])
    x.bitwise_xor_(x >> 15)
    # With u in (0, 1), -log1p(-u) is exponential; this is -u.
    minus_u = x.float().abs_().mul_(-SHRINK).sub_(SMALLEST)
    return minus_u.log1p_().neg_().log_()
