"""Few rows times the sigmoid of a linear layer's only output: a gate of a whole layer."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin

BLOCK = 1024


@triton.jit
def _weigh_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, squares_ptr, rows_ptr, eps,
    K: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one row. Every program of a row computes its gate."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    p = tl.arange(0, BLOCK_P)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    squares = tl.load(squares_ptr + row * P + p, mask=p < P, other=0.0)
    factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(x * weight, axis=0) * factor))
    at = rows_ptr + row * N + n
    numbers = tl.load(at, mask=n < N, other=0.0)
    tl.store(at, (numbers.to(tl.float32) * share).to(numbers.dtype), mask=n < N)
    let_next_begin(EARLY)


def weigh(x: Scaled, weight: torch.Tensor, rows: torch.Tensor) -> None:
    """Multiply `rows` [T, N] by the sigmoids of the norm times `weight` [1, K]; in place."""
    (num_rows, size_in), size, width = x.product.shape, rows.shape[1], x.squares.shape[1]
    assert weight.shape == (1, size_in) and rows.is_contiguous() and x.product.is_contiguous()
    _weigh_kernel[(num_rows, cdiv(size, BLOCK))](
        x.product, weight, x.squares, rows, x.eps, K=size_in, N=size, P=width,
        BLOCK_K=next_power_of_2(size_in), BLOCK_P=next_power_of_2(width), BLOCK=BLOCK,
        num_warps=4, **early(rows.device),
    )  # fmt: skip
