"""What kernels that multiply few rows share: their operands, and the end that stores outputs.

T rows, K inputs, N outputs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.triton.common import early
from nanovllm.kernels.triton.linear.gelu_and_mul import gated_by_gelu
from nanovllm.kernels.triton.linear.silu_and_mul import gated

GATES = {"silu": 1, "gelu": 2}  # the numbers by which kernels know the activation of a gate
Addends = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # residual, norm, the product with it


class RowOperands(NamedTuple):
    """What a product of few rows reads and writes, except for its weight."""

    x: torch.Tensor  # [T, K]
    bias: torch.Tensor | None  # [N], or one for each row; 2 * N if gated
    out: torch.Tensor  # [T, N]
    scaled: Scaled | None = None  # x with its sums of squares, if outputs are to be scaled
    gate: str = ""  # the activation of the gate, if outputs are gated
    addends: Addends | None = None

    @property
    def gated(self) -> bool:
        return bool(self.gate)

    @property
    def eps(self) -> float:
        return 0.0 if self.scaled is None else self.scaled.eps

    def arguments(self, columns: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """The tensors and the constants of a kernel with `columns` tiles of outputs.

        The last tensor is for the sums of squares. It has no columns without addends.
        """
        x, bias = self.x, self.bias
        squares = x.new_empty(len(x), columns if self.addends else 0, dtype=torch.float32)
        squares_in = squares if self.scaled is None else self.scaled.squares
        width = 0 if self.scaled is None else squares_in.shape[1]
        residual, norm, product = self.addends or (x, x, x)
        constants = dict(
            N=self.out.shape[1], K=x.shape[1], P=width, BLOCK_P=next_power_of_2(max(1, width)),
            BIAS=0 if bias is None else bias.dim(), GATED=GATES.get(self.gate, 0),
            ADD=self.addends is not None, **early(x.device),
        )  # fmt: skip
        tensors = squares_in, x if bias is None else bias, residual, norm, self.out, product
        return (*tensors, squares), constants


@triton.jit
def store_outputs(  # type: ignore[no-untyped-def]
    acc, up, squares, bias_ptr, residual, norm, out_ptr, product_ptr, out_squares_ptr,
    t, n, tile, at, real, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of outputs, from the sums acc and, if GATED by one of GATES, up: [T, BLOCK_N].

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
    if GATED == 1:
        acc = gated(acc, up)
    if GATED == 2:
        acc = gated_by_gelu(acc, up)
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
