"""Sums over the ranks through memory that their GPUs share, with what follows a sum fused in.

T rows of N elements, R ranks. Each rank has a buffer that the other ranks' GPUs write to. A kernel
is the same on all ranks, and its program p exchanges with program p of the others alone, through
a part of the buffers, its `region`. In exchange e of that region, a program

1. writes its addends to slot e % 2 of its region in every other rank's buffer,
2. reads the same slot of its own buffer until the addends of all other ranks are there,
3. marks these places as EMPTY again, and counts the exchange.

An addend is there when its place is not EMPTY, a value that is never sent. So there are no flags,
and nothing depends on the order in which writes arrive.

Two slots are enough, and no rank waits at the end. A rank writes slot e % 2 again in exchange
e + 2. It has then read this rank's addends of exchange e + 1, and this rank sent those in a later
kernel than the one in which it read and emptied its slot of exchange e.

The count is in memory, so CUDA graphs can replay a kernel. A program waits for the one of the same
number on other GPUs: there are at most REGIONS, few enough to run at the same time, and they start
in the same order everywhere.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.few_rows import Scaled
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin, rows_with_room

REGIONS = 512  # programs of a kernel, at most: also rows
MOST_BYTES = 1 << 22  # that a rank sends; up to there it is faster than NCCL (docs/tried)
REGION_BYTES = 1 << 14  # of one rank's addends for one program
SLOTS = 2
EMPTY_HALF = 0x8000  # memory is filled with it: a negative zero of 16 bits
EMPTY_16 = tl.constexpr(-0x8000)
EMPTY_32 = tl.constexpr(0x80008000 - (1 << 32))  # float32: a negative number next to zero
CHECK_SPINS = tl.constexpr(1 << 7)  # reads between checks that no rank has ended
FLAT, NORM, SCALED = 0, 1, 2  # what follows the sum


def buffer_bytes(size: int) -> int:
    """The size of each of `size` ranks' buffers."""
    return REGIONS * SLOTS * size * REGION_BYTES


@triton.jit
def _sum_over_ranks(  # type: ignore[no-untyped-def]
    x, at, inside, places_ptr, counts_ptr, program,
    RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """The sum in float32 of all ranks' x, in the order of ranks. `at` are places in a region.

    If a rank has ended, the result is undefined, and nothing waits.
    """
    WORD: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32  # noqa: N806
    EMPTY: tl.constexpr = EMPTY_16 if x.dtype.primitive_bitwidth == 16 else EMPTY_32  # noqa: N806
    words = x.to(WORD, bitcast=True)
    words = tl.where(words == EMPTY, 0, words)
    count = tl.load(counts_ptr + program)
    slot = (program * 2 + count % 2) * SIZE * REGION
    for other in tl.static_range(SIZE):
        if other != RANK:
            place = tl.load(places_ptr + other).to(tl.pointer_type(WORD))
            place = tl.multiple_of(place, 16) + slot + RANK * REGION
            tl.store(place + at, words, mask=inside)
    place = tl.multiple_of(tl.load(places_ptr + RANK).to(tl.pointer_type(WORD)), 16) + slot
    ended_ptr = tl.load(places_ptr + SIZE).to(tl.pointer_type(tl.int32))
    total = tl.zeros(x.shape, tl.float32)
    spins = 0
    ended = 0
    for other in tl.static_range(SIZE):
        if other == RANK:
            addends = words
        else:
            sent = place + other * REGION + at
            addends = tl.load(sent, mask=inside, other=0, volatile=True)
            missing = tl.max((addends == EMPTY).to(tl.int32), axis=0)
            while (missing > 0) & (ended == 0):
                addends = tl.load(sent, mask=inside, other=0, volatile=True)
                missing = tl.max((addends == EMPTY).to(tl.int32), axis=0)
                spins += 1
                if spins % CHECK_SPINS == 0:
                    ended = tl.load(ended_ptr, volatile=True)
            tl.store(sent, tl.full(x.shape, EMPTY, WORD), mask=inside)
        total += addends.to(x.dtype, bitcast=True).to(tl.float32)
    tl.store(counts_ptr + program, count + 1)
    return total


@triton.jit
def _all_reduce_kernel(  # type: ignore[no-untyped-def]
    x_ptr, ids_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, squares_ptr,
    places_ptr, counts_ptr, eps, x_stride, residual_stride, first_id, num_ids,
    N: tl.constexpr, BLOCK: tl.constexpr, END: tl.constexpr, LOOKUP: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program sums a row, or a piece of one."""
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


@dataclass(frozen=True)
class PeerSums:
    """Sums over the ranks, of few rows. Every rank calls the same ones in the same order.

    `places` [R + 1] in int64 has the addresses of all ranks' buffers, and that of an int32 which is
    not 0 once a rank has ended. `counts` [REGIONS] in int32 are zeros at the start, and
    this rank's buffer is filled with EMPTY_HALF.
    """

    rank: int
    size: int
    places: torch.Tensor
    counts: torch.Tensor

    def most_rows(self, like: torch.Tensor) -> int:
        """The most rows like those of `like` that these kernels sum; 0 if they are too long."""
        row_bytes = like.shape[1] * like.element_size()
        most_rows = MOST_BYTES // ((self.size - 1) * row_bytes)
        return min(REGIONS, most_rows) if row_bytes <= REGION_BYTES else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x [T, N]."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, total, FLAT, _pieces(len(x), x.shape[1]))
        return total

    def embedding(self, ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
        """The rows of token ids [T], of which this rank's table holds those from `first` on."""
        total = table.new_empty(len(ids), table.shape[1])
        self._launch(table, total, FLAT, _pieces(*total.shape), ids=ids, first_id=first)
        return total

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of the residual and all ranks' x, and their rounded sum."""
        out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        self._launch(x, total, NORM, 1, residual=residual, weight=weight, out=out, eps=eps)
        return out, total

    def add_scaled(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, Scaled]:
        """The sum of the residual and all ranks' x, and the same scaled by a norm's weight."""
        total, out = torch.empty_like(residual), rows_with_room(len(x), x.shape[1], x)
        pieces = _pieces(len(x), x.shape[1])
        squares = x.new_empty(len(x), pieces, dtype=torch.float32)
        self._launch(x, total, SCALED, pieces, residual=residual, weight=weight, out=out,
                     squares=squares)  # fmt: skip
        return total, Scaled(out, squares, eps)

    def _launch(
        self,
        x: torch.Tensor,
        total: torch.Tensor,
        end: int,
        pieces: int,
        ids: torch.Tensor | None = None,
        first_id: int = 0,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        (num_rows, size), residual = total.shape, x if residual is None else residual
        assert x.stride(1) == residual.stride(1) == 1 and num_rows * pieces <= REGIONS
        block = triton.next_power_of_2(triton.cdiv(size, pieces))
        _all_reduce_kernel[(num_rows, triton.cdiv(size, block))](
            x, self.places if ids is None else ids, residual, x if weight is None else weight,
            total if out is None else out, total, self.places if squares is None else squares,
            self.places, self.counts, eps, x.stride(0), residual.stride(0), first_id, len(x),
            N=size, BLOCK=block, END=end, LOOKUP=ids is not None, RANK=self.rank, SIZE=self.size,
            REGION=REGION_BYTES // x.element_size(), num_warps=_num_warps(block),
            **early(x.device),
        )  # fmt: skip


def _pieces(num_rows: int, size: int) -> int:
    """Into how many pieces a row is cut: a power of two with which all fit into the regions."""
    pieces = 1
    while pieces < 4 and size // (2 * pieces) >= 512 and 2 * pieces * num_rows <= REGIONS:
        pieces *= 2
    return pieces


def _num_warps(block: int) -> int:
    """The warps of a program, for 8 elements a thread, or 16 of long rows."""
    return 16 if block > 4096 else min(8, max(1, block // 256))
