"""Read the inputs of an EAGLE-3 head or a draft model from the device table.

A head reads the states that the large model has computed at a row's last positions, and the tokens
after these positions, from the table. A draft model reads only these tokens, at their own
positions.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.read_table import TableState

MODEL_FIRST = 2  # tokens that a draft model reads in its first step


class Kept(NamedTuple):
    """States that the model computed in each row's last step: `counts` positions from `first` on.

    The states at positions before the row's length are right; the others are those of wrong drafts.
    """

    first: torch.Tensor  # [rows] in int32
    counts: torch.Tensor  # [rows] in int32
    states: torch.Tensor  # [rows, most, hidden]


class GuessInputs(NamedTuple):
    """Inputs to guess drafts for B rows in a step with Q queries: at first F of each row, then 1.

    The first inputs of a head are a row's last computed positions, at most Q. Those of a draft
    model are the last token, and the token before it if that was a draft. If there are fewer than
    F, the last queries are not used. An unused query has slot -1 and context length 0. Row i of the
    `later` fields belongs to draft i; row 0 only says whether there is room for the first draft.
    """

    sources: torch.Tensor  # [B * F] in int64: which of all kept states a head reads
    next_ids: torch.Tensor  # [B * F] in int64, as are the next two: the tokens that are read
    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor  # [B * F] in int32
    last: torch.Tensor  # [B] in int64: the last used query of each row
    later_positions: torch.Tensor  # [Q - 1, B] in int64, as are the next two
    later_slots: torch.Tensor
    keys: torch.Tensor  # of the draws
    later_lens: torch.Tensor  # [Q - 1, B] in int32
    temperatures: torch.Tensor  # [B] in float32
    block_tables: torch.Tensor  # [B, any] in int32


def guess_inputs(
    table: TableState, kept: Kept | None, num_rows: int, num_queries: int, block_size: int
) -> GuessInputs:
    """Inputs for the first rows of the batch: of a head if `kept` is given, else of a draft model.

    `kept` is updated for the next step: its first position becomes the row's length. Of more than F
    new positions, the last F are read; the cache has the others since they were guessed.
    """
    rows = table.batch[:num_rows].long()
    lengths, block_tables = table.lengths[rows, None].long(), table.block_tables[rows]
    limits = table.drafts.limits[rows, None]
    if kept is None:
        num_first, shift = MODEL_FIRST, 1
        num_new = table.drafts.counts[rows, None].where(lengths >= 0, 0)
    else:
        num_first, shift = num_queries, 0
        num_new = lengths - kept.first[rows, None]
        num_new = num_new.where((num_new > 0) & (num_new <= kept.counts[rows, None]), 0)
        kept.first[rows] = lengths.flatten().int()
        kept.counts.index_fill_(0, rows, num_queries)
    queries = torch.arange(num_first, device=rows.device)
    num_used = num_new.clamp(max=num_first)
    used = queries < num_used
    index = (num_new - num_used + queries).where(used, 0)
    recent = table.drafts.recent[rows].long().gather(1, index)
    next_ids = recent.where(index < num_new - 1, table.tokens[rows, None]).clamp_(min=0)
    here = lengths - num_used + queries + shift
    new = _places(here.where(used & (here < limits), -1), block_tables, block_size)
    drafts = torch.arange(num_queries - 1, device=rows.device)
    later = (lengths + drafts - 1 + shift).where(lengths >= 0, -1)
    later = later.where(later < limits, -1)
    later_positions, later_slots, later_lens = _places(later, block_tables, block_size)
    each = torch.arange(num_rows, device=rows.device) * num_first
    most = table.drafts.recent.shape[1]
    return GuessInputs(
        (rows[:, None] * most + index).flatten(),
        next_ids.flatten(),
        new[0].flatten(),
        new[1].flatten(),
        new[2].flatten(),
        each + (num_used.flatten() - 1).clamp(min=0),
        later_positions.t().contiguous(),
        later_slots.t().contiguous(),
        noise_keys(table.seeds[rows, None], lengths + 1 + drafts).t().contiguous(),
        later_lens.t().contiguous(),
        table.temperatures[rows],
        block_tables,
    )


def _places(
    here: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, slots and context lengths for the positions `here` [B, any]; -1 means unused."""
    positions = here.clamp(min=0)
    blocks = block_tables.gather(1, positions // block_size).long()
    slots = (blocks * block_size + positions % block_size).where(here >= 0, -1)
    return positions, slots, (here + 1).int()
