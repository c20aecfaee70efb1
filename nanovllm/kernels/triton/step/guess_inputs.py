"""Read the inputs of an EAGLE-3 head or a draft model from the device table, in one kernel."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.guess_inputs import MODEL_FIRST, GuessInputs, Kept
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.triton.sampling.noise import noise_key

BLOCK = 1024  # columns of a block table that are copied at a time


@triton.jit(do_not_specialize=["num_rows", "max_blocks"])
def _guess_inputs_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, seeds_ptr, lengths_ptr, temperatures_ptr, batch_ptr, tables_ptr, recent_ptr,
    new_ptr, limits_ptr, first_ptr, counts_ptr,
    sources_ptr, next_ids_ptr, positions_ptr, slots_ptr, lens_ptr, last_ptr,
    later_positions_ptr, later_slots_ptr, keys_ptr, later_lens_ptr, out_temperatures_ptr,
    out_tables_ptr, num_rows, most, max_blocks, block_size,
    IS_MODEL: tl.constexpr, FIRST: tl.constexpr, QUERIES: tl.constexpr,
    QUERIES_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row of the batch. A draft model reads tokens at their own positions."""
    place = tl.program_id(0)
    row = tl.load(batch_ptr + place).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    token = tl.maximum(tl.load(tokens_ptr + row), 0)
    limit = tl.load(limits_ptr + row)
    table_ptr = tables_ptr + row * max_blocks
    query = tl.arange(0, QUERIES_BLOCK)
    inside = query < FIRST
    if IS_MODEL:
        num_new = tl.where(length >= 0, tl.load(new_ptr + row), 0)
    else:
        num_new = length - tl.load(first_ptr + row)
        num_new = tl.where((num_new > 0) & (num_new <= tl.load(counts_ptr + row)), num_new, 0)
        tl.store(first_ptr + row, length)
        tl.store(counts_ptr + row, QUERIES)
    num_used = tl.minimum(num_new, FIRST)
    used = query < num_used
    index = tl.where(used, num_new - num_used + query, 0)
    recent = tl.load(recent_ptr + row * most + index, mask=inside, other=0).to(tl.int64)
    at = place * FIRST + query
    tl.store(sources_ptr + at, row * most + index, mask=inside)
    tl.store(next_ids_ptr + at, tl.where(index < num_new - 1, recent, token), mask=inside)
    here = length - num_used + query + IS_MODEL
    used = used & (here < limit)
    position = tl.where(used, here, 0)
    block = tl.load(table_ptr + position // block_size, mask=inside, other=0).to(tl.int64)
    slot = tl.where(used, block * block_size + position % block_size, -1)
    tl.store(positions_ptr + at, position.to(tl.int64), mask=inside)
    tl.store(slots_ptr + at, slot, mask=inside)
    tl.store(lens_ptr + at, tl.where(used, position + 1, 0), mask=inside)
    tl.store(last_ptr + place, (place * FIRST + tl.maximum(num_used - 1, 0)).to(tl.int64))
    tl.store(out_temperatures_ptr + place, tl.load(temperatures_ptr + row))
    if QUERIES > 1:
        is_draft = query < QUERIES - 1
        at = query * num_rows + place
        here = length + query - 1 + IS_MODEL
        used = (length >= 0) & (here >= 0) & (here < limit)
        position = tl.where(used, here, 0)
        block = tl.load(table_ptr + position // block_size, mask=is_draft, other=0).to(tl.int64)
        slot = tl.where(used, block * block_size + position % block_size, -1)
        tl.store(later_positions_ptr + at, position.to(tl.int64), mask=is_draft)
        tl.store(later_slots_ptr + at, slot, mask=is_draft)
        tl.store(later_lens_ptr + at, tl.where(used, position + 1, 0), mask=is_draft)
        key = noise_key(tl.load(seeds_ptr + row), (length + 1 + query).to(tl.int64))
        tl.store(keys_ptr + at, key, mask=is_draft)
    for start in range(0, max_blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + column, mask=column < max_blocks, other=0)
        out = out_tables_ptr + place.to(tl.int64) * max_blocks + column
        tl.store(out, blocks, mask=column < max_blocks)


def guess_inputs(
    table: TableState, kept: Kept | None, num_rows: int, num_queries: int, block_size: int
) -> GuessInputs:
    """Inputs for the first rows of the batch: of a head if `kept` is given, else of a draft model.

    Bytes moved: the inputs once, the block tables twice.
    """
    drafts, tables = table.drafts, table.block_tables
    most, max_blocks = drafts.recent.shape[1], tables.shape[1]
    num_first = num_queries if kept else MODEL_FIRST
    first, counts = (kept.first, kept.counts) if kept else (None, None)
    assert tables.stride(0) == max_blocks and drafts.recent.stride(0) == most >= num_queries
    assert kept is None or kept.states.shape[1] == most

    def longs(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long, device=tables.device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=tables.device)

    size, later = num_rows * num_first, (num_queries - 1, num_rows)
    inputs = GuessInputs(
        longs(size), longs(size), longs(size), longs(size), ints(size), longs(num_rows),
        longs(*later), longs(*later), longs(*later), ints(*later),
        torch.empty(num_rows, dtype=torch.float32, device=tables.device),
        ints(num_rows, max_blocks),
    )  # fmt: skip
    _guess_inputs_kernel[(num_rows,)](
        table.tokens, table.seeds, table.lengths, table.temperatures, table.batch, tables,
        drafts.recent, drafts.counts, drafts.limits, first, counts, *inputs,
        num_rows, most, max_blocks, block_size,
        IS_MODEL=kept is None, FIRST=num_first, QUERIES=num_queries,
        QUERIES_BLOCK=triton.next_power_of_2(max(num_first, num_queries)), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return inputs
