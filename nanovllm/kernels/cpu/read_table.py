"""Read a decode step's inputs from the device table."""

from nanovllm.kernels.cpu.library import function
from nanovllm.kernels.plain import read_table as plain
from nanovllm.kernels.plain.read_table import Decoding, TableState


def read_table(
    table: TableState, num_rows: int, width: int, block_size: int, num_queries: int = 1
) -> Decoding:
    """The inputs of the first `num_rows` rows of the batch; adds 1 to their lengths in the table.

    Block tables are padded with block 0. For several queries a row, this calls the plain function.
    """
    if num_queries > 1:
        return plain.read_table(table, num_rows, width, block_size, num_queries)
    assert all(x.is_contiguous() for x in table[:-1]) and num_rows <= len(table.batch)
    longs = table.tokens.new_empty(5, num_rows)
    context_lens = table.lengths.new_empty(num_rows)
    block_tables = table.block_tables.new_empty(num_rows, width)
    temperatures = table.temperatures.new_empty(num_rows)
    function("read_table")(
        *(x.data_ptr() for x in (*table[:-1], longs, context_lens, block_tables, temperatures)),
        num_rows, table.block_tables.stride(0), width, block_size,
    )  # fmt: skip
    rows, input_ids, positions, slot_mapping, keys = longs
    return Decoding(
        rows, input_ids, positions, slot_mapping, context_lens, block_tables, temperatures, keys
    )
