"""What prefill and decode attention share: groups of similar lengths, and blocks as rows.

B sequences, K padded key length, KVH key heads, D head dimension. Sequences of similar length are
padded to one size and attended to together, so that a layer takes a few calls for any batch.
"""

import math

import torch

# Lengths within this ratio share a group: padding costs less than another call per layer.
GROUP_RATIO = 1.5
SMALLEST_GROUP = 64


def group_by_length(lengths: list[tuple[int, ...]]) -> list[list[int]]:
    """Indices of `lengths`, grouped by similar size in each dimension."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, dims in enumerate(lengths):
        key = tuple(math.ceil(math.log(max(n, SMALLEST_GROUP), GROUP_RATIO)) for n in dims)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


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
    # Enough columns wherever in a block the first key is.
    count = min(tables.shape[1], (num_keys - 2) // block_size + 2)
    firsts = first_keys.clamp(min=0) // block_size
    columns = firsts[:, None] + torch.arange(count, device=tables.device)
    lasts = (lens[:, None] - 1) // block_size
    return tables.gather(1, torch.minimum(columns, lasts).long()), firsts * block_size


def gather_blocks(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Copy blocks of `cache` [N, block_size, KVH, D] into rows: [B, KVH, K, D]."""
    num_kv_heads, head_dim = cache.shape[2:]
    rows = cache.flatten(1).index_select(0, tables.flatten())
    return rows.view(len(tables), -1, num_kv_heads, head_dim).transpose(1, 2)
