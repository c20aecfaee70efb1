"""Rows rounded to integers of 14 bits, with a scale for each run of inputs: for `block_dots`.

T rows, K inputs, R runs of RUN inputs. A separate kernel rounds, or the kernel of the norm or the
activation before the product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.attention.kv_codes import largest_of
from nanovllm.kernels.triton.common import INTERPRETED, await_inputs, early, let_next_begin
from nanovllm.kernels.triton.linear.block_planes import RUN
from nanovllm.kernels.triton.linear.rms_norm import norm_row, num_warps_of
from nanovllm.kernels.triton.linear.silu_and_mul import activated

MOST = tl.constexpr(8191)  # the largest integer
LOW_BITS = 7  # an integer is upper * 2^7 + lower, two signed bytes
WORDS = 24  # of a run's inputs that belong to a thread of four: eight pairs of words, eight sums
ACTIVATED = 1024  # activations of a program


@triton.jit
def _store_words(  # type: ignore[no-untyped-def]
    x, words_ptr, scales_ptr, row, first,
    RUNS: tl.constexpr, RUN: tl.constexpr, WORDS: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """Round the float32 inputs x of a row, from the run `first` on; they are 0 after its end.

    Thread q of four has the inputs `16 * s + 8 * j + 2 * q + h` of a run.
    """
    COUNT: tl.constexpr = x.shape[0] // RUN  # noqa: N806
    runs = tl.reshape(x, (COUNT, RUN))
    top = tl.maximum(largest_of(runs, 1), 1e-30, tl.PropagateNan.ALL)
    scale = top * (1.0 / MOST)
    inverse = 1.0 / scale if INTERPRETED else tl.div_rn(1.0, scale)
    whole = ((runs * inverse[:, None] + 12582912.0) - 12582912.0).to(tl.int32)  # ties to even
    by_thread = tl.permute(tl.reshape(whole, (COUNT, 8, 2, 4, 2)), (0, 3, 1, 2, 4))
    whole = tl.reshape(by_thread, (COUNT, 4, 8, 4))
    upper = (whole + (1 << LOW_BITS - 1)) >> LOW_BITS
    run = first + tl.arange(0, COUNT)[:, None, None]
    q, s = tl.arange(0, 4)[None, :, None], tl.arange(0, 8)[None, None, :]
    at = words_ptr + ((row * RUNS + run) * 4 + q) * WORDS
    tl.store(at + 2 * s, _word(upper), mask=run < RUNS)
    tl.store(at + 2 * s + 1, _word(whole - (upper << LOW_BITS)), mask=run < RUNS)
    tl.store(at + 16 + s, tl.sum(whole, axis=3), mask=run < RUNS)
    run = first + tl.arange(0, COUNT)
    tl.store(scales_ptr + row * RUNS + run, scale, mask=run < RUNS)


@triton.jit
def _word(values):  # type: ignore[no-untyped-def]
    """The lowest bytes of [.., 4] integers as words."""
    return tl.xor_sum((values & 255) << (tl.arange(0, 4) * 8)[None, None, None, :], axis=3)


@triton.jit
def _round_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr,
    K: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, WORDS: tl.constexpr,
    LOW_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, run = tl.program_id(0), tl.program_id(1)
    k = run * RUN + tl.arange(0, RUN)
    await_inputs(EARLY)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    _store_words(x, words_ptr, scales_ptr, row, run, RUNS, RUN, WORDS, LOW_BITS)
    let_next_begin(EARLY)


@triton.jit
def _norm_words_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, sum_ptr, words_ptr, scales_ptr, eps, x_stride, residual_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    WORDS: tl.constexpr, LOW_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the norm, round it to the type of x (as if it were stored), and then to integers."""
    row = tl.program_id(0)
    await_inputs(EARLY)
    norm = norm_row(x_ptr, residual_ptr, weight_ptr, sum_ptr, eps, row, x_stride, residual_stride,
                    K, BLOCK, ADD)  # fmt: skip
    norm = norm.to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_words(norm, words_ptr, scales_ptr, row, 0, RUNS, RUN, WORDS, LOW_BITS)
    let_next_begin(EARLY)


@triton.jit
def _activation_words_kernel(  # type: ignore[no-untyped-def]
    x_ptr, words_ptr, scales_ptr, x_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
    WORDS: tl.constexpr, LOW_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    await_inputs(EARLY)
    out = activated(x_ptr + row * x_stride, first + tl.arange(0, BLOCK), K)
    out = out.to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_words(out, words_ptr, scales_ptr, row, first // RUN, RUNS, RUN, WORDS, LOW_BITS)
    let_next_begin(EARLY)


@dataclass(frozen=True, slots=True)
class RowWords:
    """Rows [T, K] as words."""

    words: torch.Tensor  # int32 [room, R, 4, WORDS]: those of the upper bytes come first
    scales: torch.Tensor  # float32 [room, R]
    num_rows: int  # rows after them, up to a power of two, are not set
    dtype: torch.dtype  # of the rows before they were rounded, and of their products


class WordRounding:
    """The kernels that make such rows. The methods have the names of `Kernels`."""

    def rows(self, x: torch.Tensor) -> RowWords:
        """The words of x [T, K]."""
        assert x.is_contiguous()
        rounded, options = self._new(x, x.shape[1])
        _round_rows_kernel[(len(x), options["RUNS"])](
            x, rounded.words, rounded.scales, **options, num_warps=1
        )
        return rounded

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> RowWords:
        """The rounded norm of each row of x."""
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[RowWords, torch.Tensor]:
        """The rounded norm of `x + residual`, and this sum."""
        return self._norm(x, residual, weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> RowWords:
        """The rounded `silu(gate) * up` of x [T, 2 * K]."""
        assert x.stride(1) == 1
        size = x.shape[1] // 2
        rounded, options = self._new(x, size)
        _activation_words_kernel[(len(x), cdiv(size, ACTIVATED))](
            x, rounded.words, rounded.scales, x.stride(0), BLOCK=ACTIVATED, **options, num_warps=4
        )
        return rounded

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[RowWords, torch.Tensor]:
        assert x.stride(1) == weight.stride(0) == 1
        total, before = x, x
        if residual is not None:
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            before = residual
        size = x.shape[1]
        rounded, options = self._new(x, size)
        _norm_words_kernel[(len(x),)](
            x, before, weight, total, rounded.words, rounded.scales, eps, x.stride(0),
            before.stride(0), BLOCK=max(RUN, next_power_of_2(size)), ADD=residual is not None,
            **options, num_warps=num_warps_of(size),
        )  # fmt: skip
        return rounded, total

    def _new(self, x: torch.Tensor, size: int) -> tuple[RowWords, dict[str, int]]:
        """Allocate rounded rows; also return the kernels' constants."""
        room, runs = next_power_of_2(len(x)), cdiv(size, RUN)
        words = torch.empty(room, runs, 4, WORDS, dtype=torch.int32, device=x.device)
        scales = torch.empty(room, runs, dtype=torch.float32, device=x.device)
        options = dict(
            K=size, RUNS=runs, RUN=RUN, WORDS=WORDS, LOW_BITS=LOW_BITS, **early(x.device)
        )
        return RowWords(words, scales, len(x), x.dtype), options


WORD_ROUNDING = WordRounding()
