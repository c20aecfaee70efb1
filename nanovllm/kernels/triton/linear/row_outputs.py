"""The end of kernels that multiply few rows: norm, bias, activation, residual and stores."""

import triton
import triton.language as tl

from nanovllm.kernels.triton.linear.silu_and_mul import gated


@triton.jit
def store_outputs(  # type: ignore[no-untyped-def]
    acc, up, squares, bias_ptr, residual, norm, out_ptr, product_ptr, out_squares_ptr,
    t, n, tile, at, real, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of outputs, from the sums acc and, if GATED, up: [T, BLOCK_N].

    `squares` are P parts of the rows' sums of squares, for the norm before the layer. `t` and `n`
    are the rows and outputs of this tile, the `tile`-th of N, with n at most N - 1. `at` are the
    places of its elements, and `real` says which of them exist. BIAS is 1 for a bias [N], or 2 for
    a bias of each row; if GATED, the bias of the ups follows that of the gates. With ADD, this
    stores the sum with the residual, its product with the next norm's weight, and its sums of
    squares.
    """
    if P:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        acc *= factor
        up *= factor
    if BIAS == 2:
        bias_at = bias_ptr + (at + t[:, None] * N if GATED else at)
        acc += tl.load(bias_at, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + N, mask=real, other=0.0).to(tl.float32)
    if BIAS == 1:
        acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up)
    if ADD:
        acc += residual.to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=real)
    if ADD:
        wide = rounded.to(tl.float32)
        if N % BLOCK_N:
            wide = tl.where(real, wide, 0.0)
        product = wide * norm.to(tl.float32)[None, :]
        tl.store(product_ptr + at, product.to(product_ptr.dtype.element_ty), mask=real)
        TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N  # noqa: N806
        square_at = out_squares_ptr + t * TILES + tile
        tl.store(square_at, tl.sum(wide * wide, axis=1), mask=t < num_rows)
