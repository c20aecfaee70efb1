"""A decode step's inputs for further cache groups, and for layers that keep states.

`read_table` reads those of the first group.
"""

import torch

from nanovllm.kernels.plain.read_table import Decoding, TableState


def read_groups(
    table: TableState, block_tables: torch.Tensor, decoding: Decoding, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [groups, B] and block tables [groups, sequences, width] of further cache groups.

    `decoding` is what `read_table` returned; `block_tables` [groups, rows, any] are the table's.
    """
    num_seqs, width = decoding.block_tables.shape
    tables = block_tables[:, :, :width].index_select(1, table.batch[:num_seqs])
    blocks = (decoding.positions // block_size).view(1, num_seqs, -1)
    blocks = tables.gather(2, blocks.expand(len(tables), -1, -1)).flatten(1).long()
    slots = blocks * block_size + decoding.positions % block_size
    return slots.where(decoding.context_lens > 0, -1), tables


def read_slots(
    slots: torch.Tensor, table: TableState, decoding: Decoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots from which a decode step of B queries reads states, and to which it writes them.

    These are, for each sequence, the slot with the states before its first query, and for each
    query, the slot for the states after it. `decoding` is what `read_table` returned. `slots`
    [rows, N] are the rows' own slots: the states after position p are in slot p % N of them. A row
    with slots of 0 keeps no states.
    """
    num_seqs = len(decoding.block_tables)
    own = slots.index_select(0, table.batch[:num_seqs]).long()
    positions = decoding.positions.view(num_seqs, -1)
    before = own.gather(1, (positions[:, :1] - 1) % slots.shape[1]).squeeze(1)
    after = own.gather(1, positions % slots.shape[1]).flatten()
    is_first = decoding.context_lens.view(num_seqs, -1)[:, 0] <= 1
    is_kept = (decoding.context_lens > 0) & (after > 0)
    return before.masked_fill(is_first, 0), after.where(is_kept, -1)
