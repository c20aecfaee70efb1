"""Reading a decode step's inputs from the device table."""

from nanovllm.kernels.cpu.library import function
from nanovllm.kernels.plain.read_table import Decoding, TableState


def read_table(table: TableState, num_rows: int, width: int, block_size: int) -> Decoding:
    """The inputs of the first `num_rows` rows of the batch; adds 1 to their lengths in the table.

    Block tables are filled up with block 0.
    """
    assert all(x.is_contiguous() for x in table) and num_rows <= len(table.batch)
    longs = table.tokens.new_empty(5, num_rows)
    context_lens = table.lengths.new_empty(num_rows)
    block_tables = table.block_tables.new_empty(num_rows, width)
    temperatures = table.temperatures.new_empty(num_rows)
    function("read_table")(
        *(x.data_ptr() for x in (*table, longs, context_lens, block_tables, temperatures)),
        num_rows, table.block_tables.stride(0), width, block_size,
    )  # fmt: skip
    rows, input_ids, positions, slot_mapping, keys = longs
    return Decoding(
        rows, input_ids, positions, slot_mapping, context_lens, block_tables, temperatures, keys
    )
