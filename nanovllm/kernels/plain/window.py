"""The blocks that queries with a window see. It is loaded when a layer has one."""

import torch


def seen_blocks(
    tables: torch.Tensor,
    lens: torch.Tensor,
    first_keys: torch.Tensor,
    num_keys: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of tables [B, blocks] with `num_keys` keys from `first_keys` [B] on.

    Also returns the position [B] of each row's first column. A row with fewer blocks repeats its
    last one.
    """
    # Enough columns for any position of the first key in its block.
    count = min(tables.shape[1], (num_keys - 2) // block_size + 2)
    firsts = first_keys.clamp(min=0) // block_size
    columns = firsts[:, None] + torch.arange(count, device=tables.device)
    lasts = (lens[:, None] - 1) // block_size
    return tables.gather(1, torch.minimum(columns, lasts).long()), firsts * block_size


def decode_window(
    tables: torch.Tensor, lens: torch.Tensor, window: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks in the window of rows with context lengths [B, 1], and the keys [B, K] outside.

    `tables` [B, blocks] has all blocks of the rows.
    """
    first_keys = lens - window
    tables, starts = seen_blocks(tables, lens[:, 0], first_keys[:, 0], window, block_size)
    offsets = torch.arange(tables.shape[1] * block_size, device=tables.device)
    positions = starts[:, None] + offsets
    return tables, (positions < first_keys) | (positions >= lens)
