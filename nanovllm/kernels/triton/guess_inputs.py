"""Reading the inputs of an EAGLE-3 head's guesses from the device table, in one kernel."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.guess_inputs import GuessInputs, Kept
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.triton.noise import noise_key

BLOCK = 1024  # columns of a block table that are copied together


@triton.jit(do_not_specialize=["num_rows", "max_blocks"])
def _guess_inputs_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, seeds_ptr, lengths_ptr, temperatures_ptr, batch_ptr, tables_ptr, recent_ptr,
    limits_ptr, first_ptr, counts_ptr,
    sources_ptr, next_ids_ptr, positions_ptr, slots_ptr, lens_ptr, last_ptr,
    later_positions_ptr, later_slots_ptr, keys_ptr, later_lens_ptr, out_temperatures_ptr,
    out_tables_ptr, num_rows, most, max_blocks, block_size,
    QUERIES: tl.constexpr, QUERIES_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row of the batch."""
    place = tl.program_id(0)
    row = tl.load(batch_ptr + place).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    first = tl.load(first_ptr + row)
    count = tl.load(counts_ptr + row)
    token = tl.load(tokens_ptr + row)
    table_ptr = tables_ptr + row * max_blocks
    query = tl.arange(0, QUERIES_BLOCK)
    inside = query < QUERIES
    num_new = length - first
    num_new = tl.where((num_new > 0) & (num_new <= count), num_new, 0)
    num_used = tl.minimum(num_new, QUERIES)
    used = query < num_used
    index = tl.where(used, num_new - num_used + query, 0)
    recent = tl.load(recent_ptr + row * most + index, mask=inside, other=0).to(tl.int64)
    at = place * QUERIES + query
    tl.store(sources_ptr + at, row * most + index, mask=inside)
    tl.store(next_ids_ptr + at, tl.where(index < num_new - 1, recent, token), mask=inside)
    position = tl.where(used, length - num_used + query, 0)
    block = tl.load(table_ptr + position // block_size, mask=inside, other=0).to(tl.int64)
    slot = tl.where(used, block * block_size + position % block_size, -1)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=inside)
    tl.store(slots_ptr + at, slot, mask=inside)
    tl.store(lens_ptr + at, tl.where(used, position + 1, 0), mask=inside)
    tl.store(last_ptr + place, (place * QUERIES + tl.maximum(num_used - 1, 0)).to(tl.int64))
    tl.store(out_temperatures_ptr + place, tl.load(temperatures_ptr + row))
    if QUERIES > 1:
        is_draft = query < QUERIES - 1
        at = query * num_rows + place
        here = length + query - 1
        used = (length >= 0) & (here >= 0) & (here < tl.load(limits_ptr + row))
        position = tl.where(used, here, 0)
        block = tl.load(table_ptr + position // block_size, mask=is_draft, other=0).to(tl.int64)
        slot = tl.where(used, block * block_size + position % block_size, -1)
        tl.store(later_positions_ptr + at, position.to(tl.int64), mask=is_draft)
        tl.store(later_slots_ptr + at, slot, mask=is_draft)
        tl.store(later_lens_ptr + at, tl.where(used, position + 1, 0), mask=is_draft)
        key = noise_key(tl.load(seeds_ptr + row), (length + 1 + query).to(tl.int64))
        tl.store(keys_ptr + at, key, mask=is_draft)
    tl.store(first_ptr + row, length)
    tl.store(counts_ptr + row, QUERIES)
    for start in range(0, max_blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + column, mask=column < max_blocks, other=0)
        out = out_tables_ptr + place.to(tl.int64) * max_blocks + column
        tl.store(out, blocks, mask=column < max_blocks)


def guess_inputs(
    table: TableState, kept: Kept, num_rows: int, num_queries: int, block_size: int
) -> GuessInputs:
    """The inputs of guesses for the first rows of the batch; `kept` is set for the step that comes.

    Bytes moved: the inputs once, the block tables twice.
    """
    drafts, tables = table.drafts, table.block_tables
    most, max_blocks = kept.states.shape[1], tables.shape[1]
    assert tables.stride(0) == max_blocks and drafts.recent.stride(0) == most >= num_queries

    def longs(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long, device=tables.device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=tables.device)

    size, later = num_rows * num_queries, (num_queries - 1, num_rows)
    inputs = GuessInputs(
        longs(size), longs(size), longs(size), longs(size), ints(size), longs(num_rows),
        longs(*later), longs(*later), longs(*later), ints(*later),
        torch.empty(num_rows, dtype=torch.float32, device=tables.device),
        ints(num_rows, max_blocks),
    )  # fmt: skip
    _guess_inputs_kernel[(num_rows,)](
        table.tokens, table.seeds, table.lengths, table.temperatures, table.batch, tables,
        drafts.recent, drafts.limits, kept.first, kept.counts, *inputs,
        num_rows, most, max_blocks, block_size,
        QUERIES=num_queries, QUERIES_BLOCK=triton.next_power_of_2(num_queries), BLOCK=BLOCK,
        num_warps=1,
    )  # fmt: skip
    return inputs
