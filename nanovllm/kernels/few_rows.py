"""Linear layers of few rows, and what stands around them, as one Triton kernel each.

Twins: `plain.scaled_linear`, `plain.scaled_gated`, `plain.add_linear`. T rows, K inputs, N outputs.

A decode step of few rows is bound by its kernels' number and by their beginnings and ends: reading
a weight takes a microsecond or two of the five that a kernel takes. So a norm has none of its own.
Whoever adds to the residual has its rows at hand, and writes them multiplied by the norm's weight
beside the sums of their squares; whoever reads that applies the factor, which is a row's, to what
it has computed.

Programs take tiles of the outputs. Where there are few of these, several programs share one, each
with a part of the inputs; whoever comes last adds up the parts, in their order.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    MEASURED,
    await_inputs,
    capability,
    dot,
    early,
    let_next_begin,
    num_multiprocessors,
)
from nanovllm.kernels.plain import Scaled

LEAST = 16  # of everything that tensor cores multiply: sizes are multiples of it
MOST_ROWS, MOST_OF_LARGE = 128, 64  # cuBLAS is ahead of more, the latter where a layer is large
LARGE_LAYER = 32 << 20  # weights
SHARED_BYTES = {1: 160 << 10, 2: 112 << 10}  # of tiles in flight, by programs on a multiprocessor
# Programs for each multiprocessor, by the rows of a tile: from how many on tiles of 64 outputs are
# faster than of 32, and up to how many are made by sharing tiles.
WIDE_FROM = {16: 0.48, 32: 0.36, 64: 0.6}
SHARE_UP_TO = {16: 2, 32: 1.5, 64: 1}


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, squares_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, product_ptr,
    out_squares_ptr, partial_ptr, arrivals_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of outputs, or this program's part of it."""
    part = tl.program_id(2)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = part * (K // SPLIT) + tl.arange(0, BLOCK_K)
    real = (t < num_rows)[:, None]
    await_inputs(EARLY)
    if P:  # read before the weights, which take longest
        p = tl.arange(0, BLOCK_P)
        parts = real & (p < P)[None, :]
        squares = tl.load(squares_ptr + t[:, None] * P + p[None, :], mask=parts, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    x_at = x_ptr + t[:, None] * K + k[None, :]
    weight_at = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    # Tensor cores take 64 rows of what is on the left: the outputs, where there are no more rows.
    TURNED: tl.constexpr = BLOCK_T < 64 and BLOCK_N >= 64  # noqa: N806
    acc = tl.zeros([BLOCK_N, BLOCK_T] if TURNED else [BLOCK_T, BLOCK_N], tl.float32)
    up = acc
    for _ in range(0, K // SPLIT, BLOCK_K):
        x = tl.load(x_at, mask=real, other=0.0)
        weight = tl.load(weight_at)
        acc += dot(weight, tl.trans(x)) if TURNED else dot(x, tl.trans(weight))
        if GATED:
            weight = tl.load(weight_at + tl.full([], N, tl.int64) * K)
            up += dot(weight, tl.trans(x)) if TURNED else dot(x, tl.trans(weight))
        x_at += BLOCK_K
        weight_at += BLOCK_K
    let_next_begin(EARLY)
    if TURNED:
        acc = tl.trans(acc)
        up = tl.trans(up)
    is_last = True
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inside = tl.arange(0, BLOCK_T)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts_at = partial_ptr + tile * (SPLIT * BLOCK_T * BLOCK_N) + inside
        tl.store(parts_at + part * (BLOCK_T * BLOCK_N), acc)
        # The barrier puts all threads' writes before the release; reads are behind the acquire.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            acc = tl.load(parts_at, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(parts_at + other * (BLOCK_T * BLOCK_N), cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)  # for the next layer
    if is_last:
        if P:
            acc *= factor
            up *= factor
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        at = t[:, None] * N + n[None, :]
        if ADD:
            acc += tl.load(residual_ptr + at, mask=real, other=0.0).to(tl.float32)
        rounded = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rounded, mask=real)
        if ADD:
            wide = rounded.to(tl.float32)
            product = wide * tl.load(norm_ptr + n).to(tl.float32)[None, :]
            tl.store(product_ptr + at, product.to(product_ptr.dtype.element_ty), mask=real)
            square_at = out_squares_ptr + t * (N // BLOCK_N) + tl.program_id(0)
            tl.store(square_at, tl.sum(wide * wide, axis=1), mask=t < num_rows)


@dataclass(frozen=True)
class FewRows:
    """The kernels, and what they share. Between two of them all counters are 0."""

    most_rows: int  # above it they are not faster
    arrivals: torch.Tensor  # int32: of a tile's programs, how many are done

    @property
    def warmup_rows(self) -> list[int]:
        """Numbers of rows that between them take all the tiles that there are."""
        return [rows for rows in (16, 32, 64, 128) if rows <= self.most_rows]

    def linear(
        self, x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply normed rows by weight [N, K]. Reads it once for each 64 rows."""
        out = x.product.new_empty(len(x.product), len(weight))
        self._launch(x.product, weight, bias, out, scaled=x)
        return out

    def gated(
        self, x: Scaled, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same with gate beside up, weight [2 * N, K], and the activation of both: [T, N]."""
        out = x.product.new_empty(len(x.product), len(weight) // 2)
        self._launch(x.product, weight, bias, out, scaled=x, gated=True)
        return out

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, Scaled]:
        """Add `x @ weight.T + bias` to the residual: the sum, and it for a norm's weight."""
        total, product = torch.empty_like(residual), torch.empty_like(residual)
        squares = self._launch(x, weight, bias, total, addends=(residual, norm, product))
        return total, Scaled(product, squares, eps)

    def _launch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        scaled: Scaled | None = None,
        gated: bool = False,
        addends: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Launch the kernel; the squares of the sums, if there are addends."""
        (num_rows, size_in), size_out = x.shape, out.shape[1]
        assert x.is_contiguous() and weight.is_contiguous()
        processors = num_multiprocessors(x.device)
        tiles = _tiles(num_rows, size_in, size_out, gated, addends is not None, processors)
        rows, columns = triton.cdiv(num_rows, tiles.rows), size_out // tiles.outputs
        assert rows * columns <= len(self.arrivals)
        parts = rows * columns * tiles.rows * tiles.outputs * tiles.programs
        partial = x.new_empty(parts if tiles.programs > 1 else 0, dtype=torch.float32)
        squares = x.new_empty(num_rows, columns if addends else 0, dtype=torch.float32)
        residual, norm, product = addends or (x, x, x)
        squares_in, eps = (squares, 0.0) if scaled is None else (scaled.squares, scaled.eps)
        width = 0 if scaled is None else squares_in.shape[1]
        _linear_kernel[(columns, rows, tiles.programs)](
            x, squares_in, weight, x if bias is None else bias, residual, norm, out, product,
            squares, partial, self.arrivals, num_rows, eps,
            N=size_out, K=size_in, P=width, BLOCK_P=triton.next_power_of_2(max(1, width)),
            BIAS=bias is not None, GATED=gated, ADD=addends is not None, SPLIT=tiles.programs,
            BLOCK_T=tiles.rows, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs,
            num_warps=4, num_stages=tiles.stages, **early(x.device),
        )  # fmt: skip
        return squares


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut up; outputs and inputs are divisors of the sizes."""

    rows: int
    outputs: int
    inputs: int  # at a time
    programs: int  # that share a tile
    stages: int  # tiles of inputs in flight


@functools.cache
def _tiles(
    num_rows: int, size_in: int, size_out: int, gated: bool, add: bool, processors: int
) -> Tiles:
    """By what was fastest for the layers of Qwen3-0.6B, 4B and 8B."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    row_tiles = triton.cdiv(num_rows, rows)
    wide_programs = row_tiles * size_out // 64 * (2 if add else 1)
    outputs = _divisor(size_out, 64 if wide_programs >= WIDE_FROM[rows] * processors else 32)
    inputs = _divisor(size_in, 64 if gated and outputs == 64 else 128)
    num_tiles, most = row_tiles * size_out // outputs, SHARE_UP_TO[rows] * processors
    can_share = (n for n in (4, 2) if size_in // inputs % n == 0 and num_tiles * n <= most)
    programs = next(can_share, 1) if add else 1
    side_by_side = 1 if num_tiles * programs <= processors else 2
    tile_bytes = (rows + outputs * (1 + gated)) * inputs * 2
    stages = SHARED_BYTES[side_by_side] // tile_bytes
    return Tiles(rows, outputs, inputs, programs, max(2, min(5, stages)))


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size` and is not above `most`."""
    return min(most, size & -size)


def few_rows_for(weights: list[torch.Tensor | None]) -> FewRows | None:
    """The kernels for a layer's weights, or None where they would not be faster.

    Not for float16, in which rows that lack their factor may be too large.
    """
    plain = [weight for weight in weights if weight is not None and weight.dtype == torch.bfloat16]
    if len(plain) < len(weights) or any(n % LEAST for weight in plain for n in weight.shape):
        return None
    device = plain[0].device
    if device.type == "cuda" and capability(device) != MEASURED:
        return None
    large = sum(weight.numel() for weight in plain) >= LARGE_LAYER
    largest = max(n for weight in plain for n in weight.shape)
    arrivals = torch.zeros(2 * largest // LEAST, dtype=torch.int32, device=device)
    return FewRows(MOST_OF_LARGE if large else MOST_ROWS, arrivals)
