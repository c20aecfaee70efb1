"""Sums over ranks on several GPUs, fused with the operations around them, and drawing tokens.

T rows of N elements. `exchange` explains how the GPUs exchange numbers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin, rows_with_room
from nanovllm.kernels.triton.ranks import exchange
from nanovllm.kernels.triton.ranks.exchange import REGION_BYTES, receive, send, words_of
from nanovllm.kernels.triton.sampling.candidates import NO_TOKEN
from nanovllm.kernels.triton.sampling.infinite import checked, is_odd
from nanovllm.kernels.triton.sampling.sample import most_pieces, race_pieces

MOST_BYTES = 1 << 22  # the most bytes that a rank sends: the largest measured size (docs/tried)
FLAT, NORM, SCALED = 0, 1, 2  # what follows the sum
LEAST_BLOCK = 256  # numbers of a program, divided among its threads


@triton.jit
def _sum_over_ranks(  # type: ignore[no-untyped-def]
    x, at, inside, places_ptr, counts_ptr, program,
    RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """The sum in float32 of all ranks' x, in the order of ranks."""
    words = words_of(x)
    place, ended = send(words, at, inside, places_ptr, counts_ptr, program, RANK, SIZE, REGION)
    total = tl.zeros(x.shape, tl.float32)
    for other in tl.static_range(SIZE):
        addends = words
        if other != RANK:
            addends = receive(place, ended, words, at, inside, places_ptr, counts_ptr, other, SIZE,
                              REGION)  # fmt: skip
        total += addends.to(x.dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_ids"])  # otherwise prompts would compile more kernels
def _all_reduce_kernel(  # type: ignore[no-untyped-def]
    x_ptr, ids_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, squares_ptr,
    places_ptr, counts_ptr, eps, x_stride, residual_stride, first_id, num_ids,
    N: tl.constexpr, BLOCK: tl.constexpr, END: tl.constexpr, LOOKUP: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program adds up a row, or a piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    at = tl.arange(0, BLOCK)
    n = piece * BLOCK + at
    inside = n < N
    await_inputs(EARLY)
    if LOOKUP:
        index = tl.load(ids_ptr + row) - first_id
        held = (index >= 0) & (index < num_ids)
        x = tl.load(x_ptr + index * x_stride + n, mask=inside & held, other=0.0)
    else:
        x = tl.load(x_ptr + row * x_stride + n, mask=inside, other=0.0)
    if END:
        residual = tl.load(residual_ptr + row * residual_stride + n, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32)
    total = _sum_over_ranks(x, at, inside, places_ptr, counts_ptr,
                            tl.program_id(0) * pieces + piece, RANK, SIZE, REGION)  # fmt: skip
    let_next_begin(EARLY)
    if END:
        total += residual.to(tl.float32)
    rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * N + n, rounded, mask=inside)
    if END:
        wide = rounded.to(tl.float32)
        squares = tl.sum(wide * wide, axis=0)
        out = wide * weight
        if END == 1:
            out = wide * tl.rsqrt(squares / N + eps) * weight
        else:
            tl.store(squares_ptr + row * pieces + piece, squares)
        tl.store(out_ptr + row * N + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pieces"])
def _first_best_of_ranks_kernel(  # type: ignore[no-untyped-def]
    best_ptr, ids_ptr, out_ptr, places_ptr, counts_ptr, num_pieces,
    BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program finds the first best token of one row, in all pieces of all ranks."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < num_pieces
    await_inputs(EARLY)
    best = tl.load(best_ptr + row * num_pieces + n, mask=inside, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_pieces + n, mask=inside, other=NO_TOKEN)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, ids, NO_TOKEN), axis=0)
    top = checked(top, tl.sum(is_odd(best), axis=0))
    at = tl.arange(0, 32)  # the score and the token; one place for each thread
    entry = tl.where(at == 0, top.to(tl.int32, bitcast=True), winner)
    words = words_of(entry)
    place, ended = send(words, at, at < 2, places_ptr, counts_ptr, row, RANK, SIZE, REGION)
    top = tl.full([], -float("inf"), tl.float32)
    winner = tl.full([], NO_TOKEN, tl.int32)
    num_odd = tl.zeros([], tl.int32)
    for other in tl.static_range(SIZE):
        entry = words
        if other != RANK:
            entry = receive(place, ended, words, at, at < 2, places_ptr, counts_ptr, other, SIZE,
                            REGION)  # fmt: skip
        score = tl.sum(tl.where(at == 0, entry, 0), axis=0).to(tl.float32, bitcast=True)
        token = tl.sum(tl.where(at == 1, entry, 0), axis=0)
        wins = (score > top) | ((score == top) & (token < winner))
        top = tl.where(wins, score, top)
        winner = tl.where(wins, token, winner)
        num_odd += is_odd(score)
    let_next_begin(EARLY)
    winner = tl.where(checked(top, num_odd) > -float("inf"), winner, -1)
    tl.store(out_ptr + row, winner.to(tl.int64))


@dataclass(frozen=True)
class PeerKernels:
    """Exchanges of few rows with the other ranks. Every rank makes the same calls in the same
    order.

    `places` [R + 1] in int64 has the addresses of all ranks' buffers, and the address of an int32
    that is not 0 after a rank has ended. At the start, `counts` [1 + REGIONS] in int32 are zeros,
    and this rank's buffer is filled with EMPTY_HALF.
    """

    rank: int
    size: int
    places: torch.Tensor
    counts: torch.Tensor
    most_bytes: int = MOST_BYTES

    def most_rows(self, like: torch.Tensor) -> int:
        """The most rows like those of `like` that these kernels add up; 0 if rows are too long."""
        row_bytes = like.shape[1] * like.element_size()
        most_rows = self.most_bytes // ((self.size - 1) * row_bytes)
        return min(exchange.REGIONS, most_rows) if row_bytes <= REGION_BYTES else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x [T, N]."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, total, FLAT, _block(x.shape[1]))
        return total

    def embedding(self, ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
        """The rows of token ids [T]; this rank's part of the table begins with id `first`."""
        total = table.new_empty(len(ids), table.shape[1])
        self._launch(table, total, FLAT, _block(table.shape[1]), ids=ids, first_id=first)
        return total

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of the residual and all ranks' x, and their rounded sum."""
        out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        block = _block(x.shape[1])
        self._launch(x, total, NORM, block, residual=residual, weight=weight, out=out, eps=eps)
        return out, total

    def add_scaled(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, Scaled]:
        """The sum of the residual and all ranks' x, and this sum scaled by a norm's weight."""
        total, out = torch.empty_like(residual), rows_with_room(len(x), x.shape[1], x)
        block = _block(x.shape[1], _pieces(len(x), x.shape[1]))
        pieces = cdiv(x.shape[1], block)
        squares = x.new_empty(len(x), pieces, dtype=torch.float32)
        self._launch(x, total, SCALED, block, residual=residual, weight=weight, out=out,
                     squares=squares)  # fmt: skip
        return total, Scaled(out, squares, eps)

    def sample(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Token ids [B] as `sample` defines them, from logits with columns on all ranks.

        This rank has the columns from `first` on: [B, columns].
        """
        best, ids = race_pieces(logits, temperatures, keys, first)
        num_rows, pieces = best.shape
        largest = most_pieces(logits.shape[1])
        out = ids.new_empty(num_rows, dtype=torch.int64)
        assert num_rows <= exchange.REGIONS
        _first_best_of_ranks_kernel[(num_rows,)](
            best, ids, out, self.places, self.counts, pieces,
            BLOCK=next_power_of_2(largest), RANK=self.rank, SIZE=self.size,
            REGION=REGION_BYTES // 4, num_warps=1, **early(logits.device),
        )  # fmt: skip
        return out

    def _launch(
        self,
        x: torch.Tensor,
        total: torch.Tensor,
        end: int,
        block: int,
        ids: torch.Tensor | None = None,
        first_id: int = 0,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        (num_rows, size), residual = total.shape, x if residual is None else residual
        pieces = cdiv(size, block)
        assert x.stride(1) == residual.stride(1) == 1 and num_rows * pieces <= exchange.REGIONS
        assert min(block, size) * x.element_size() <= REGION_BYTES
        _all_reduce_kernel[(num_rows, pieces)](
            x, self.places if ids is None else ids, residual, x if weight is None else weight,
            total if out is None else out, total, self.places if squares is None else squares,
            self.places, self.counts, eps, x.stride(0), residual.stride(0), first_id, len(x),
            N=size, BLOCK=block, END=end, LOOKUP=ids is not None, RANK=self.rank, SIZE=self.size,
            REGION=REGION_BYTES // x.element_size(), num_warps=_num_warps(block),
            **early(x.device),
        )  # fmt: skip


def _block(size: int, pieces: int = 1) -> int:
    """The numbers of a program, if about `pieces` programs share a row."""
    return max(LEAST_BLOCK, next_power_of_2(cdiv(size, pieces)))


def _pieces(num_rows: int, size: int) -> int:
    """The number of pieces of a row: as many as the regions allow, if pieces are not too short."""
    pieces = 1
    while pieces < 4 and size // (2 * pieces) >= 512 and 2 * pieces * num_rows <= exchange.REGIONS:
        pieces *= 2
    return pieces


def _num_warps(block: int) -> int:
    """The warps of a program: for 8 elements a thread, or 16 in long rows."""
    return 16 if block > 4096 else min(8, max(1, block // 256))
