"""Fused linear layer for up to 16 rows: registers hold the weights for the tensor cores.

T rows, K inputs, N outputs.

As in `held_weights`, a program loads all its weights while the kernel before it ends, and the
programs that run at the same time hold the whole matrix. The inputs are divided among the warps of
a program, and are loaded in the order in which the tensor cores read them: a thread loads TOGETHER
of them at a time. So neither weights nor rows move through shared memory; only the warps' sums do.

Gluon has no interpreter: the kernel's results are tested on a GPU.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.triton.linear.held_weights import HELD, TILE
from nanovllm.kernels.triton.linear.row_outputs import RowOperands, store_outputs

TOGETHER = gl.constexpr(8)  # neighbouring inputs, 16 bytes


@gluon.jit
def begin(EARLY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the end of the kernel before this one, then let the next one start."""
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // dummy $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def sum_squares(  # type: ignore[no-untyped-def]
    squares_ptr, num_rows,
    BLOCK_T: gl.constexpr, BLOCK_P: gl.constexpr, P: gl.constexpr, WARPS: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Add up P parts of the rows' squares: [BLOCK_T, 1], for outputs with the layout OUT."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])  # noqa: N806
    row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, ROWS))
    p = gl.arange(0, BLOCK_P, gl.SliceLayout(0, ROWS))
    parts = (row < num_rows)[:, None] & (p < P)[None, :]
    squares = gl.load(squares_ptr + row[:, None] * P + p[None, :], mask=parts, other=0.0)
    return gl.convert_layout(gl.sum(squares, axis=1), gl.SliceLayout(1, OUT))[:, None]


@gluon.jit
def _along(SIZE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers 0 to SIZE - 1 along one of three dimensions."""
    first: gl.constexpr = 1 if DIM == 0 else 0
    second: gl.constexpr = 1 if DIM == 2 else 2
    numbers = gl.arange(0, SIZE, gl.SliceLayout(first, gl.SliceLayout(second, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(numbers, first), second)


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    rows_ptr, num_rows, first_k,
    ROWS: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, WARPS: gl.constexpr,
    MMA: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Load PART inputs of each warp from rows of a matrix, as an operand of the tensor cores.

    The last of `num_rows` rows is repeated.
    """
    layout: gl.constexpr = gl.DotOperandLayout(OPERAND, MMA, TOGETHER)
    row = _along(ROWS, 1 + OPERAND, layout)
    if OPERAND == 1:  # weights: all outputs exist
        row = gl.minimum(row, num_rows - 1)
    k = first_k + _along(WARPS, 0, layout) * PART + _along(PART, 2 - OPERAND, layout)
    return gl.load(rows_ptr + (row * K + k))


@gluon.jit
def _hold(  # type: ignore[no-untyped-def]
    weight_ptr, first_n,
    BLOCK_N: gl.constexpr, K: gl.constexpr, PART: gl.constexpr, WARPS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Load the weights of all inputs for BLOCK_N outputs; an entry has PART inputs of each warp."""
    weights = ()
    for k in gl.static_range(0, K, PART * WARPS):
        more = _load(weight_ptr + first_n * K, BLOCK_N, k, BLOCK_N, K, PART, WARPS, MMA, 0)
        weights = weights + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return weights


@gluon.jit(do_not_specialize=["num_rows"])
def _held_tiles_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, squares_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr,
    out_squares_ptr, num_rows, eps,
    N: gl.constexpr, K: gl.constexpr, BLOCK_P: gl.constexpr, P: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr,
    PART: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])  # noqa: N806
    SUMS: gl.constexpr = gl.BlockedLayout(  # noqa: N806
        [WARPS, 1, 1], [1, 32 // BLOCK_N, BLOCK_N], [1, WARPS, 1], [2, 1, 0]
    )
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)  # noqa: N806
    CHUNK: gl.constexpr = PART * WARPS  # noqa: N806
    first_n = gl.program_id(1) * BLOCK_N
    weights = _hold(weight_ptr, first_n, BLOCK_N, K, PART, WARPS, MMA)
    if GATED:
        up_weights = _hold(weight_ptr, N + first_n, BLOCK_N, K, PART, WARPS, MMA)
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(1, OUT))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
    at = t[:, None] * N + n[None, :]
    real = (t < num_rows)[:, None] & (n < N)[None, :]
    norm, residual, squares = at, at, at
    if ADD:
        norm = gl.load(norm_ptr + n)
    begin(EARLY)
    if P:
        squares = sum_squares(squares_ptr, num_rows, BLOCK_T, BLOCK_P, P, WARPS, OUT)
    if ADD:
        residual = gl.load(residual_ptr + at, mask=real, other=0.0)
    acc = gl.zeros([WARPS, BLOCK_N, BLOCK_T], gl.float32, MMA)
    up = acc
    for i in gl.static_range(K // CHUNK):
        x = _load(x_ptr, num_rows, i * CHUNK, BLOCK_T, K, PART, WARPS, MMA, 1)
        acc = mma_v2(weights[i], x, acc)
        if GATED:
            up = mma_v2(up_weights[i], x, up)
    acc = gl.sum(gl.convert_layout(gl.permute(acc, (0, 2, 1)), SUMS), axis=0)
    if GATED:
        up = gl.sum(gl.convert_layout(gl.permute(up, (0, 2, 1)), SUMS), axis=0)
    store_outputs(acc, up if GATED else acc, squares, bias_ptr, residual, norm, out_ptr,
                  product_ptr, out_squares_ptr, t, n, gl.program_id(1), at, real, num_rows, eps,
                  N, K, P, BIAS, GATED, ADD, BLOCK_N)  # fmt: skip


def launch(rows: RowOperands, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel for a weight that `can_hold_tiles`. Returns the sums of squares, if any."""
    x, (num_rows, size_out), size_in = rows.x, rows.out.shape, rows.x.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    held = TILE * size_in * (1 + rows.gated)
    outputs = 2 * TILE if held <= HELD and size_out % (2 * TILE) == 0 else TILE
    warps = 8 if held <= 2 * HELD else 16
    part = size_in // warps & -(size_in // warps)  # a power of two
    tensors, constants = rows.arguments(size_out // outputs)
    _held_tiles_kernel[(1, size_out // outputs)](
        x, weight, *tensors, num_rows, rows.eps, BLOCK_T=max(8, next_power_of_2(num_rows)),
        BLOCK_N=outputs, PART=part, WARPS=warps, num_warps=warps, **constants,
    )  # fmt: skip
    return tensors[-1]
