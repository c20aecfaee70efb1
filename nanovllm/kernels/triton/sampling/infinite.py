"""Which rows give no token: some scores are NaN, several are infinite, or all are minus infinity.

One infinite score wins.
"""

import triton
import triton.language as tl

INFINITE = tl.constexpr(float("inf"))


@triton.jit
def is_odd(score):  # type: ignore[no-untyped-def]
    """1 for a score that is NaN or infinite, else 0. Minus infinity is a usual score."""
    return ((score != score) | (score == float("inf"))).to(tl.int32)


@triton.jit
def checked(top, num_odd):  # type: ignore[no-untyped-def]
    """The largest score `top`; NaN if some scores are NaN, or several are infinite."""
    is_one = (num_odd == 1) & (top == float("inf"))
    return tl.where((num_odd == 0) | is_one, top, float("nan"))
