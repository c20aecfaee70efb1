"""What the recurrences' kernels share: gates, parts of a step, products of matrices."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), also exact where exp(x) is small. It is x where x is above 20."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    is_one = total == 1.0
    # The quotient corrects for the rounding of the total.
    exact = tl.log(total) * (power / tl.where(is_one, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(is_one, power, exact))


@triton.jit
def log_forget(x, log_rate):  # type: ignore[no-untyped-def]
    """The logarithm of the factor by which a head's memory shrinks in a time x."""
    return -tl.exp(log_rate) * x


@triton.jit
def learn_rate(b, most):  # type: ignore[no-untyped-def]
    """The share of a correction that is made."""
    return most / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def tokens_of(parts_ptr, place, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sequence, its first row and its number of tokens: by its place in a decode step, or in
    a prefill's table of parts.
    """
    if QUERIES > 0:
        sequence, first, count = place, place.to(tl.int64) * QUERIES, QUERIES
    else:
        part_ptr = parts_ptr + place * 8
        sequence, first = tl.load(part_ptr), tl.load(part_ptr + 1).to(tl.int64)
        count = tl.load(part_ptr + 2)
    return sequence, first, count


@triton.jit
def multiply(a, b):  # type: ignore[no-untyped-def]
    """`a @ b`, with sums in float32; a float32 matrix is rounded to tf32.

    The interpreter needs float32, and does not round it.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32")


def computes_chunks(dtype: torch.dtype) -> bool:
    """Whether chunks are computed, not one token after the other.

    float32 would be rounded. Products that are not take thousands of registers.
    """
    return dtype != torch.float32 or bool(INTERPRETED)


def products_in(dtype: torch.dtype) -> torch.dtype:
    """The type of the matrices that are multiplied in chunks.

    float16 might overflow between products, and as tf32 it loses nothing.
    """
    return dtype if dtype == torch.bfloat16 else torch.float32


def num_stages(dtype: torch.dtype) -> int:
    """The stages of a loop over chunks. With three, a chunk is read while another is computed."""
    return 3 if dtype == torch.bfloat16 else 1


def value_block(num_heads: int, value_size: int) -> int:
    """The values of a head that a program computes.

    A model with few heads needs smaller blocks, so that one sequence occupies a GPU. It does not
    depend on the step: neither do sums.
    """
    return 32 if num_heads * value_size >= MANY_VALUES else 16


MANY_VALUES = 4096  # 32 for each of 128 programs
