"""Read a decode step's inputs from the device table.

This is the first kernel of a decode graph: with it, a graph can start before the host knows the
tokens of the previous step.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.plain.read_table import Decoding, TableState
from nanovllm.kernels.triton.sampling.noise import noise_key

BLOCK = 1024  # columns of a block table that are copied at a time


@triton.jit(do_not_specialize=["stride", "width", "unused_row"])  # or steps would compile more
def _read_table_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, seeds_ptr, lengths_ptr, temperatures_ptr, batch_ptr, tables_ptr,
    drafts_ptr, limits_ptr, longs_ptr, context_lens_ptr, out_tables_ptr, out_temperatures_ptr,
    stride, most_drafts, max_blocks, width, block_size, unused_row,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one query: five 64-bit numbers, two of 32 bits, and the block table.

    If a row has several queries, the program of the first one copies the block table.
    """
    place = tl.program_id(0)
    query = place % QUERIES
    row = tl.load(batch_ptr + place // QUERIES).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    used = length >= 0
    if QUERIES > 1:
        is_draft = query > 0
        draft = tl.load(drafts_ptr + row * most_drafts + query - 1, mask=is_draft, other=0)
        used = used & (draft >= 0) & (length + query < tl.load(limits_ptr + row))
        length = tl.where(used, length + query, -1)
    position = tl.maximum(length, 0)
    table_ptr = tables_ptr + row * max_blocks
    block = tl.load(table_ptr + position // block_size, mask=used, other=0).to(tl.int64)
    slot = tl.where(used, block * block_size + position % block_size, -1)
    token = tl.maximum(tl.load(tokens_ptr + row, mask=used, other=0), 0)
    if QUERIES > 1:
        token = tl.where(is_draft & used, draft.to(tl.int64), token)
    key = noise_key(tl.load(seeds_ptr + row), (length + 1).to(tl.int64))
    longs_ptr += place
    tl.store(longs_ptr, row if QUERIES == 1 else unused_row)
    tl.store(longs_ptr + stride, token)
    tl.store(longs_ptr + 2 * stride, position.to(tl.int64))
    tl.store(longs_ptr + 3 * stride, slot)
    tl.store(longs_ptr + 4 * stride, key)
    tl.store(context_lens_ptr + place, length + 1)
    tl.store(out_temperatures_ptr + place, tl.load(temperatures_ptr + row))
    if QUERIES == 1:
        tl.store(lengths_ptr + row, length + 1, mask=used)
    num_blocks = tl.where(used, (position + QUERIES - 1) // block_size + 1, 0)
    num_blocks = tl.minimum(num_blocks, max_blocks)
    for start in range(0, tl.where(query == 0, width, 0), BLOCK):
        column = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + column, mask=column < num_blocks, other=0)
        at = out_tables_ptr + (place // QUERIES).to(tl.int64) * width + column
        tl.store(at, blocks, mask=column < width)


def read_table(
    table: TableState, num_rows: int, width: int, block_size: int, num_queries: int = 1
) -> Decoding:
    """The inputs of the first `num_rows` rows of the batch; adds 1 to their lengths in the table.

    Block tables are padded with block 0. Bytes moved: the inputs once, the used blocks twice. With
    several queries for each row, lengths do not change, and `rows` is the table's last row.
    """
    device = table.tokens.device
    size = num_rows * num_queries
    longs = torch.empty(5, size + size % 2, dtype=torch.long, device=device)  # 16 bytes
    context_lens = torch.empty(size, dtype=torch.int32, device=device)
    temperatures = torch.empty(size, dtype=torch.float32, device=device)
    block_tables = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    drafts = table.drafts
    assert table.block_tables.stride(1) == 1 and num_queries <= 1 + drafts.tokens.shape[1]
    _read_table_kernel[(size,)](
        table.tokens, table.seeds, table.lengths, table.temperatures, table.batch,
        table.block_tables, drafts.tokens, drafts.limits, longs, context_lens, block_tables,
        temperatures, longs.stride(0), drafts.tokens.stride(0), table.block_tables.stride(0),
        width, block_size, len(table.tokens) - 1,
        QUERIES=num_queries, BLOCK=BLOCK,
    )  # fmt: skip
    rows, input_ids, positions, slot_mapping, keys = longs[:, :size]
    return Decoding(
        rows, input_ids, positions, slot_mapping, context_lens, block_tables, temperatures, keys
    )
