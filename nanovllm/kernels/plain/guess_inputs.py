"""Reading the inputs of an EAGLE-3 head's guesses from the device table.

The head reads what the model has computed at a row's last positions, and the tokens after these,
which the table has.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.read_table import TableState


class Kept(NamedTuple):
    """What the model has computed in the last step of each row, at positions from `first` on.

    Of these `counts` positions the ones before the row's length are right.
    """

    first: torch.Tensor  # [rows] in int32
    counts: torch.Tensor  # [rows] in int32
    states: torch.Tensor  # [rows, most, hidden]


class GuessInputs(NamedTuple):
    """The inputs of guesses for B rows in a step with Q queries: first Q of each row, then 1 each.

    The first ones are a row's last computed positions, fewer than Q at times: then the last queries
    are not used. An unused one has slot -1 and context length 0. Row i of the `later` ones is that
    of draft i; row 0 has no use.
    """

    sources: torch.Tensor  # [B * Q] in int64: which of all kept states
    next_ids: torch.Tensor  # [B * Q] in int64, as are the next two: the tokens after the positions
    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor  # [B * Q] in int32
    last: torch.Tensor  # [B] in int64: the last used query of each row
    later_positions: torch.Tensor  # [Q - 1, B] in int64, as are the next two
    later_slots: torch.Tensor
    keys: torch.Tensor  # of the draws
    later_lens: torch.Tensor  # [Q - 1, B] in int32
    temperatures: torch.Tensor  # [B] in float32
    block_tables: torch.Tensor  # [B, any] in int32


def guess_inputs(
    table: TableState, kept: Kept, num_rows: int, num_queries: int, block_size: int
) -> GuessInputs:
    """The inputs of guesses for the first rows of the batch; `kept` is set for the step that comes.

    Its first position is the row's length. Of more than Q new positions, the last Q are read:
    what the head made of the others when it guessed is in its cache.
    """
    rows = table.batch[:num_rows].long()
    lengths, block_tables = table.lengths[rows, None].long(), table.block_tables[rows]
    queries = torch.arange(num_queries, device=rows.device)
    num_new = lengths - kept.first[rows, None]
    num_new = num_new.where((num_new > 0) & (num_new <= kept.counts[rows, None]), 0)
    num_used = num_new.clamp(max=num_queries)
    used = queries < num_used
    index = (num_new - num_used + queries).where(used, 0)
    recent = table.drafts.recent[rows].long().gather(1, index)
    next_ids = recent.where(index < num_new - 1, table.tokens[rows, None])
    new = _places((lengths - num_used + queries).where(used, -1), block_tables, block_size)
    drafts = queries[1:] - 1  # one less than there are queries
    later = (lengths + drafts - 1).where(lengths >= 0, -1)
    later = later.where(later < table.drafts.limits[rows, None], -1)
    later_positions, later_slots, later_lens = _places(later, block_tables, block_size)
    kept.first[rows] = lengths.flatten().int()
    kept.counts.index_fill_(0, rows, num_queries)
    each = torch.arange(num_rows, device=rows.device) * num_queries
    return GuessInputs(
        (rows[:, None] * kept.states.shape[1] + index).flatten(),
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
    """Positions, slots and context lengths of the positions `here` [B, any]; -1 for none."""
    positions = here.clamp(min=0)
    blocks = block_tables.gather(1, positions // block_size).long()
    slots = (blocks * block_size + positions % block_size).where(here >= 0, -1)
    return positions, slots, (here + 1).int()
