"""Read a decode step's inputs from the device table; the columns of the table.

Every running sequence owns a row of the table. A decode step is a batch of row numbers; its other
inputs are already on the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.plain.noise import noise_keys

UNUSED_LENGTH = -1  # the length of a row that no sequence owns
NO_DRAFT = -1
CHANCE_BITS = 20  # of `DraftState.chance`


class DraftState(NamedTuple):
    """The columns of the device table for drafts; they are empty in an engine without drafts.

    A row's drafts are guesses of the tokens after its last one, with NO_DRAFT if there are fewer.
    They are guessed at the beginning of the step that verifies them. The `recent` tokens of a row
    are the `counts` tokens that its last step has added.
    """

    tokens: torch.Tensor  # [rows, most drafts] in int32
    limits: torch.Tensor  # [rows] in int32: the first position without a block, or beyond the end
    counts: torch.Tensor  # [rows] in int32
    recent: torch.Tensor  # [rows, 1 + most drafts] in int32
    history: torch.Tensor  # [rows, any] in int32: tokens by position, without the recent ones
    chance: torch.Tensor  # [1] in int32: chance to accept a wrong draft, in 2^-20; for measurements


class TableState(NamedTuple):
    """The device table: columns with one entry for each row, and the batch of a decode step.

    A length counts the tokens in the cache, so it is the position of the row's next token. An
    unused row has UNUSED_LENGTH.
    """

    # [rows] in int64: each sequence's last token, the next step's input; below 0, and read as 0, if
    # no token could be drawn.
    tokens: torch.Tensor
    seeds: torch.Tensor  # [rows] in int64
    lengths: torch.Tensor  # [rows] in int32
    temperatures: torch.Tensor  # [rows] in float32
    batch: torch.Tensor  # [any] in int32: row numbers
    block_tables: torch.Tensor  # [rows, any] in int32
    drafts: DraftState


class Decoding(NamedTuple):
    """The inputs of B queries of a decode step: the same number of queries for each sequence.

    An unused query has slot -1 and context length 0.
    """

    rows: torch.Tensor  # [B] in int64, as are the next three: where the drawn tokens go
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor  # [B] in int32
    block_tables: torch.Tensor  # [sequences, width] in int32
    temperatures: torch.Tensor  # [B] in float32
    keys: torch.Tensor  # [B] in int64: of the draws


def read_table(
    table: TableState, num_rows: int, width: int, block_size: int, num_queries: int = 1
) -> Decoding:
    """The inputs of the first `num_rows` rows of the batch; adds 1 to their lengths in the table.

    Block tables are the first `width` columns. Entries after a row's last block have no meaning.
    With several queries for each row (its last token and its first drafts), lengths do not change,
    and `rows` is the table's last row: `accept` updates the rows when the tokens are drawn.
    """
    rows = table.batch[:num_rows].long()
    block_tables = table.block_tables[:, :width][rows]
    tokens, kept_at, tables = table.tokens[rows], rows, block_tables
    lengths = table.lengths[rows]
    used = lengths >= 0
    if num_queries == 1:
        table.lengths[rows] = lengths + used
    else:
        drafts = table.drafts.tokens[rows, : num_queries - 1].long()
        lengths = lengths[:, None] + torch.arange(num_queries, device=rows.device)
        used = used[:, None] & (F.pad(drafts, (1, 0)) != NO_DRAFT)
        used &= lengths < table.drafts.limits[rows, None]
        lengths = lengths.where(used, -1)
        tokens = torch.cat([tokens[:, None], drafts], dim=1).flatten()
        used, lengths = used.flatten(), lengths.flatten().int()
        rows, tables = (x.repeat_interleave(num_queries, dim=0) for x in (rows, block_tables))
        kept_at = torch.full_like(rows, len(table.tokens) - 1)
    positions = lengths.clamp(min=0).long()
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    return Decoding(
        kept_at,
        tokens.where(used, 0).clamp_(min=0),
        positions,
        (blocks * block_size + positions % block_size).where(used, -1),
        lengths + 1,
        block_tables,
        table.temperatures[rows],
        noise_keys(table.seeds[rows], lengths + 1),
    )
