"""The random numbers of sampling in Triton. `kernels/plain/noise.py` defines and explains them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.kernels.plain import noise
from nanovllm.kernels.triton.common import INTERPRETED

P1, P2, P3, P4, P5 = (tl.constexpr(prime) for prime in noise.PRIMES)
TOP_BIT = tl.constexpr(noise.TOP_BIT)
GOLDEN = tl.constexpr(noise.GOLDEN)
MIXER_1, MIXER_2 = (tl.constexpr(mixer) for mixer in noise.MIXERS)
SHRINK = tl.constexpr(noise.SHRINK)
SMALLEST = tl.constexpr(noise.SMALLEST)


@triton.jit
def noise_key(seed, num_tokens):  # type: ignore[no-untyped-def]
    """The key of a draw, equal to `noise_keys` to the last bit. Both arguments are int64."""
    x = seed + P5 + 8
    x = _rotate_left(x ^ (_rotate_left(num_tokens * P2, 31) * P1), 27) * P1 + P4
    x = (x ^ _shift_right(x, 33)) * P2
    x = (x ^ _shift_right(x, 29)) * P3
    return x ^ _shift_right(x, 32) ^ TOP_BIT


@triton.jit
def _shift_right(x, bits):  # type: ignore[no-untyped-def]
    """Shift to the right, and fill with zeros instead of the sign."""
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def _rotate_left(x, bits):  # type: ignore[no-untyped-def]
    return (x << bits) | _shift_right(x, 64 - bits)


@triton.jit
def log_exponential(key, ids):  # type: ignore[no-untyped-def]
    """Logarithms of the exponential numbers of token ids, within about 3e-6 of the definition's."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    x = ((ids * GOLDEN) ^ low) * MIXER_1
    x = ((x ^ (x >> 15)) + high) * MIXER_2
    x = x ^ (x >> 15)
    u = tl.abs(x.to(tl.float32)) * SHRINK + SMALLEST
    # -log1p(-u): by its series for small times, which 1 - u would round to equal numbers.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return _log(tl.where(u < 1 / 16, series, -_log(1.0 - u)))


@triton.jit
def _log(x):  # type: ignore[no-untyped-def]
    """The hardware's logarithm, with an absolute or relative error of at most 2^-22."""
    return tl.log(x) if INTERPRETED else libdevice.fast_logf(x)
