"""A decode step read off the rows of its sequences, as a Triton kernel; `plain.read_rows` says how.

It is the first kernel of a decode graph, and what lets that begin without a word of the host's.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain import PRIMES, TOP_BIT, Decoding, RowState

BLOCK = 1024  # columns of a block table that are copied together
P1, P2, P3, P4, P5 = (tl.constexpr(prime) for prime in PRIMES)
SIGN = tl.constexpr(TOP_BIT)


@triton.jit
def _shift_right(x, bits):  # type: ignore[no-untyped-def]
    """Zeros come in, not the sign."""
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def _rotate_left(x, bits):  # type: ignore[no-untyped-def]
    return (x << bits) | _shift_right(x, 64 - bits)


@triton.jit
def _noise_key(seed, num_tokens):  # type: ignore[no-untyped-def]
    x = seed + P5 + 8
    x = _rotate_left(x ^ (_rotate_left(num_tokens * P2, 31) * P1), 27) * P1 + P4
    x = (x ^ _shift_right(x, 33)) * P2
    x = (x ^ _shift_right(x, 29)) * P3
    return x ^ _shift_right(x, 32) ^ SIGN


@triton.jit(do_not_specialize=["stride", "width"])  # or it is compiled in the middle of a run
def _read_rows_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, seeds_ptr, lengths_ptr, temperatures_ptr, batch_ptr, tables_ptr,
    longs_ptr, context_lens_ptr, out_tables_ptr, out_temperatures_ptr,
    stride, max_blocks, width, block_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one row: five numbers in 64 bits, two in 32, and the block table."""
    place = tl.program_id(0)
    row = tl.load(batch_ptr + place).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    there = length >= 0
    position = tl.maximum(length, 0)
    table_ptr = tables_ptr + row * max_blocks
    block = tl.load(table_ptr + position // block_size, mask=there, other=0).to(tl.int64)
    slot = tl.where(there, block * block_size + position % block_size, -1)
    token = tl.load(tokens_ptr + row, mask=there, other=0)
    key = _noise_key(tl.load(seeds_ptr + row), (length + 1).to(tl.int64))
    longs_ptr += place
    tl.store(longs_ptr, row)
    tl.store(longs_ptr + stride, token)
    tl.store(longs_ptr + 2 * stride, position.to(tl.int64))
    tl.store(longs_ptr + 3 * stride, slot)
    tl.store(longs_ptr + 4 * stride, key)
    tl.store(context_lens_ptr + place, length + 1)
    tl.store(out_temperatures_ptr + place, tl.load(temperatures_ptr + row))
    tl.store(lengths_ptr + row, length + 1, mask=there)
    num_blocks = tl.where(there, position // block_size + 1, 0)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + column, mask=column < num_blocks, other=0)
        at = out_tables_ptr + place.to(tl.int64) * width + column
        tl.store(at, blocks, mask=column < width)


def read_rows(state: RowState, num_rows: int, width: int, block_size: int) -> Decoding:
    """The step of the first `num_rows` of the batch, whose lengths go up by one.

    Block tables are filled up with block 0. Bytes moved: what the step gets, and the tables' blocks
    once more.
    """
    device = state.tokens.device
    longs = torch.empty(5, num_rows + num_rows % 2, dtype=torch.long, device=device)  # 16 bytes
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    temperatures = torch.empty(num_rows, dtype=torch.float32, device=device)
    tables = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    assert state.block_tables.stride(1) == 1
    _read_rows_kernel[(num_rows,)](
        state.tokens, state.seeds, state.lengths, state.temperatures, state.batch,
        state.block_tables, longs, context_lens, tables, temperatures, longs.stride(0),
        state.block_tables.stride(0), width, block_size,
        BLOCK=BLOCK,
    )  # fmt: skip
    rows, input_ids, positions, slot_mapping, keys = longs[:, :num_rows]
    return Decoding(
        rows, input_ids, positions, slot_mapping, context_lens, tables, temperatures, keys
    )
