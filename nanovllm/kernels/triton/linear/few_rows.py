"""Linear layers for few rows, each in one kernel with the operations before and after it.

T rows, K inputs, N outputs.

The time of a decode step of few rows is mostly the starts and ends of its kernels: a kernel takes
about five microseconds, and reading the weight only one or two of them. So a norm has no kernel of
its own. The kernel that adds to the residual also writes the sum times the norm's weight, and its
sums of squares. The next linear layer computes each row's factor from the sums of squares, and
multiplies its outputs by it.

A program computes one tile of the outputs, from all inputs. Hopper's tensor memory accelerator
copies the tiles that it reads. For small weights, up to 16 rows use `held_tiles`, and up to 32 rows
`shared_tiles`. If these do not support the weight's size, one or two rows use `held_weights`.
"""

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
from nanovllm.kernels.triton.common import (
    await_inputs,
    can_copy_tiles,
    can_overlap,
    dot,
    let_next_begin,
    num_multiprocessors,
    rows_with_room,
    tiles_of,
    with_room,
)
from nanovllm.kernels.triton.experts.few_experts import add_experts
from nanovllm.kernels.triton.linear import block_linear, held_weights, quantized_rows
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.block_planes import BlockPlanes
from nanovllm.kernels.triton.linear.few_rows_tiles import LEAST, tiles_for
from nanovllm.kernels.triton.linear.rounded_linear import can_round
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs
from nanovllm.kernels.triton.linear.row_tiles import FEW, FEW_ROUNDED
from nanovllm.kernels.triton.linear.weigh import weigh

MOST_ROWS = {32 << 20: 256, 128 << 20: 128}  # by a layer's weights; for more rows cuBLAS is faster
MOST_OF_LARGE = 64  # the most rows for larger layers
Weight = torch.Tensor | ArrangedMatrix | BlockPlanes  # [N, K], or a stack of them
MOST_TILES = held_weights.MOST_BYTES >> 17  # of `shared_tiles`: a program has 128 KiB of weights


@triton.jit
def multiply_tiles(  # type: ignore[no-untyped-def]
    x_tiles, weight_tiles, first_t, first_n, N: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of outputs; if GATED, one tile of gates and one tile of ups."""
    # Tensor cores read 64 rows of the left matrix: it is the weight if the tile has enough outputs.
    TURNED: tl.constexpr = BLOCK_N >= 64  # noqa: N806
    acc = tl.zeros([BLOCK_N, BLOCK_T] if TURNED else [BLOCK_T, BLOCK_N], tl.float32)
    up = acc
    for k in range(0, K, BLOCK_K):
        x = x_tiles.load([first_t, k])
        weight = weight_tiles.load([first_n, k])
        acc = dot(weight, tl.trans(x), acc) if TURNED else dot(x, tl.trans(weight), acc)
        if GATED:
            weight = weight_tiles.load([N + first_n, k])
            up = dot(weight, tl.trans(x), up) if TURNED else dot(x, tl.trans(weight), up)
    let_next_begin(EARLY)
    if TURNED:
        acc = tl.trans(acc)
        up = tl.trans(up)
    return acc, up


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_tiles, weight_tiles, squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr,
    out_squares_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs. Neighbouring programs use the same weights for other rows."""
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    real = (t < num_rows)[:, None]
    at = t[:, None] * N + n[None, :]
    await_inputs(EARLY)
    # Loads for the end of the kernel start before those of the weights, which take longest.
    if P:
        p = tl.arange(0, BLOCK_P)
        parts = real & (p < P)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=parts, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=real, other=0.0)
        norm = tl.load(norm_ptr + n)
    acc, up = multiply_tiles(x_tiles, weight_tiles, first_t, first_n, N, K, GATED, BLOCK_T, BLOCK_N,
                             BLOCK_K, EARLY)  # fmt: skip
    store_outputs(acc, up, squares if P else acc, bias_ptr, residual if ADD else acc,
                  norm if ADD else acc, out_ptr, product_ptr, out_squares_ptr, t, n,
                  tl.program_id(1), at, real, num_rows, eps, N, K, P, BIAS, GATED, ADD,
                  BLOCK_N)  # fmt: skip


@dataclass(frozen=True)
class FewRows:
    """The kernels, and the largest number of rows for which they are faster.

    Each model has its own object, because `arrivals` is used by one kernel at a time. A bias may
    have a row for each row of x.
    """

    form = "nanovllm.layers.few_rows"  # the module that computes blocks with these kernels

    most_rows: int
    arrivals: torch.Tensor | None = field(default=None, compare=False)  # zeros, for `shared_tiles`

    def linear(
        self, x: Scaled | torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`norm @ weight.T + bias` for weight [N, K]."""
        if isinstance(x, torch.Tensor):
            return self.product(x, weight, bias)
        out = x.product.new_empty(len(x.product), weight.shape[0])
        self._launch(RowOperands(x.product, bias, out, scaled=x), weight)
        return out

    def product(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`: of normed rows, or a rank's part of a sum."""
        out = x.new_empty(len(x), weight.shape[0])
        self._launch(RowOperands(x, bias, out), weight)
        return out

    def gated(
        self,
        x: Scaled | torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        gate: str = "silu",
    ) -> torch.Tensor:
        """`silu(gate) * up` of `norm @ weight.T + bias` for weight [2 * N, K]: [T, N].

        `gate` names the activation: one of `row_outputs.GATES`.
        """
        scaled = x if isinstance(x, Scaled) else None
        rows = x.product if isinstance(x, Scaled) else x
        out = rows_with_room(len(rows), weight.shape[0] // 2, rows)
        self._launch(RowOperands(rows, bias, out, scaled, gate), weight)
        return out

    def add(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, Scaled]:
        """`residual + x @ weight.T + bias`, and the sum scaled by the next norm's weight.

        May overwrite the residual.
        """
        total, product = torch.empty_like(residual), rows_with_room(len(x), weight.shape[0], x)
        addends = residual, norm, product
        squares = self._launch(RowOperands(x, bias, total, addends=addends), weight)
        return total, Scaled(product, squares, eps)

    def add_experts(
        self,
        x: Scaled,
        weights: ExpertWeights,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, Scaled]:
        """`residual` plus the experts' outputs, and the sum scaled by the next norm's weight."""
        return add_experts(x, weights, residual, norm, eps)

    def weigh(self, x: Scaled, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Multiply `rows` [T, any] by `sigmoid(norm @ weight.T)` for weight [1, K]; in place."""
        weigh(x, weight, rows)
        return rows

    def _launch(self, rows: RowOperands, weight: Weight) -> torch.Tensor:
        """Launch the weight's kernel. Returns the sums of squares, if there are addends."""
        if isinstance(weight, BlockPlanes):
            return block_linear.launch(rows, weight)
        if isinstance(weight, ArrangedMatrix):
            assert weight.order is None, "the kernel takes inputs in the order of the codes"
            return quantized_rows.launch(rows, weight)
        x, num_rows = rows.x, len(rows.x)
        # The kernels in Gluon are imported here because Triton may not have Gluon.
        if held_weights.can_hold_tiles(num_rows, weight, rows.gated) and can_overlap(x.device):
            from nanovllm.kernels.triton.linear import held_tiles

            return held_tiles.launch(rows, weight)
        if held_weights.can_share_tiles(num_rows, weight) and can_overlap(x.device):
            from nanovllm.kernels.triton.linear import shared_tiles

            zeros = self.arrivals
            if zeros is None:
                zeros = x.new_zeros(MOST_TILES, dtype=torch.int32)
            return shared_tiles.launch(rows, weight, zeros)
        if held_weights.can_hold(num_rows, weight):
            return held_weights.launch(rows, weight)
        return launch_tiles(rows, weight)


def launch_tiles(rows: RowOperands, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel for any weight. Returns the sums of squares, if there are addends."""
    x, (num_rows, size_out) = rows.x, rows.out.shape
    processors = num_multiprocessors(x.device)
    tiles = tiles_for(num_rows, x.shape[1], size_out, rows.gated, processors)
    columns = size_out // tiles.outputs
    tensors, constants = rows.arguments(columns)
    _linear_kernel[(cdiv(num_rows, tiles.rows), columns)](
        tiles_of(with_room(x, tiles.rows), tiles.rows, tiles.inputs),
        tiles_of(weight, tiles.outputs, tiles.inputs), *tensors, num_rows, rows.eps,
        BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs,
        num_warps=4, num_stages=tiles.stages, **constants,
    )  # fmt: skip
    return tensors[-1]


def few_rows_for(
    weights: list[Weight | ExpertWeights | None], dtype: torch.dtype = torch.bfloat16
) -> FewRows | None:
    """The kernels for a layer's weights and the type of its rows; None if they are not faster.

    There are none for float16, in which rows without their norm's factor may overflow. Experts do
    not limit the number of rows.
    """
    made: list[Weight] = []
    for weight in weights:
        if weight is None or not _is_computed(weight):
            return None
        if not isinstance(weight, ExpertWeights):
            made.append(weight)
    if dtype != torch.bfloat16:
        return None
    device = made[0].device
    if not can_copy_tiles(device):
        return None
    arranged = [weight for weight in made if not isinstance(weight, torch.Tensor)]
    if arranged:
        return FewRows(min(FEW_ROUNDED if _rounds(weight) else FEW for weight in arranged))
    if cdiv(max(weight.shape[0] for weight in made), 2 * 64) > 2 * num_multiprocessors(device):
        return None  # tiles of 64 gates and ups would not all run at the same time: not measured
    size = sum(math.prod(weight.shape) for weight in made)
    most = next((rows for limit, rows in MOST_ROWS.items() if size < limit), MOST_OF_LARGE)
    return FewRows(most, torch.zeros(MOST_TILES, dtype=torch.int32, device=device))


def _rounds(weight: ArrangedMatrix | BlockPlanes) -> bool:
    """Whether products of more than FEW_ROUNDED rows round them."""
    return isinstance(weight, ArrangedMatrix) and can_round(weight, weight.device)


def _is_computed(weight: Weight | ExpertWeights) -> bool:
    """Whether there is a kernel for the weight."""
    if isinstance(weight, ExpertWeights):
        stacks = weight.gate_up, weight.down
        return weight.router is not None and all(map(_is_computed, stacks))
    if isinstance(weight, BlockPlanes):
        return True
    if isinstance(weight, ArrangedMatrix):
        return weight.has_rows_kernel and weight.order is None
    return weight.dtype == torch.bfloat16 and not any(n % LEAST for n in weight.shape[-2:])
