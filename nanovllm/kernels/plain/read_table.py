"""Reading a decode step's inputs from the device table, and what the table holds.

Every running sequence owns a row of the table. A decode step is a batch of row numbers; the rest of
its inputs is on the device already.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.plain.noise import noise_keys

UNUSED_LENGTH = -1  # the length of a row that no sequence owns


class TableState(NamedTuple):
    """The device table: columns with one entry for each row, and the batch of a decode step.

    A length counts the tokens in the cache, so it is the position of the row's next token. An
    unused row has UNUSED_LENGTH.
    """

    tokens: torch.Tensor  # [rows] in int64: each sequence's last token, the next step's input
    seeds: torch.Tensor  # [rows] in int64
    lengths: torch.Tensor  # [rows] in int32
    temperatures: torch.Tensor  # [rows] in float32
    batch: torch.Tensor  # [any] in int32: row numbers
    block_tables: torch.Tensor  # [rows, any] in int32


class Decoding(NamedTuple):
    """The inputs of a decode step of B rows. An unused row has slot -1 and context length 0."""

    rows: torch.Tensor  # [B] in int64, as are the next three
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor  # [B] in int32
    block_tables: torch.Tensor  # [B, width] in int32
    temperatures: torch.Tensor  # [B] in float32
    keys: torch.Tensor  # [B] in int64: of the draws


def read_table(table: TableState, num_rows: int, width: int, block_size: int) -> Decoding:
    """The inputs of the first `num_rows` rows of the batch; adds 1 to their lengths in the table.

    Block tables are the first `width` columns. Entries after a row's last block have no meaning.
    """
    rows = table.batch[:num_rows].long()
    lengths = table.lengths[rows]
    used = lengths >= 0
    positions = lengths.clamp(min=0).long()
    block_tables = table.block_tables[:, :width][rows]
    blocks = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    table.lengths[rows] = lengths + used
    return Decoding(
        rows,
        table.tokens[rows].where(used, 0),
        positions,
        (blocks * block_size + positions % block_size).where(used, -1),
        lengths + 1,
        block_tables,
        table.temperatures[rows],
        noise_keys(table.seeds[rows], lengths + 1),
    )
