"""Functions that prefill and decode attention share: groups of similar lengths, blocks as rows.

B sequences, K padded key length, KVH key heads, D head dimension. Sequences of similar length are
padded to one size and computed together, so that a layer takes a few calls for any batch.
"""

import math

import torch

from nanovllm.kernels.operands.kv_layer import KVLayer

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
    # Enough columns for any position of the first key in its block.
    count = min(tables.shape[1], (num_keys - 2) // block_size + 2)
    firsts = first_keys.clamp(min=0) // block_size
    columns = firsts[:, None] + torch.arange(count, device=tables.device)
    lasts = (lens[:, None] - 1) // block_size
    return tables.gather(1, torch.minimum(columns, lasts).long()), firsts * block_size


def attend_capped(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, kv: KVLayer
) -> torch.Tensor:
    """Attention of queries [B, H, Q, D] with a soft cap on the scores, at least in float32.

    `seen` [B, H, Q, K] is true for the scores that count; its sizes may be 1.
    """
    assert kv.soft_cap is not None
    num_kv_heads, shape = keys.shape[1], queries.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = queries.to(wide).reshape(shape[0], num_kv_heads, -1, shape[3])
    scores = (rows @ keys.to(wide).transpose(2, 3)).view(*shape[:3], -1) * kv.scale
    scores = torch.tanh(scores / kv.soft_cap) * kv.soft_cap
    weights = scores.masked_fill_(~seen, -math.inf).softmax(-1)
    out = weights.view(shape[0], num_kv_heads, -1, keys.shape[2]) @ values.to(wide)
    return out.view(shape).to(queries.dtype)


def gather_blocks(
    kv: KVLayer, tables: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy blocks of the caches into rows: keys and values [B, KVH, K, D] of the type `dtype`."""
    found: list[torch.Tensor] = []
    blocks = tables.flatten()
    for cache, scales in ((kv.k_cache, kv.k_scales), (kv.v_cache, kv.v_scales)):
        if found and kv.is_shared and kv.k_scales is kv.v_scales:
            break
        rows = cache.flatten(1).index_select(0, blocks).view(-1, *cache.shape[1:])
        if scales is not None:
            from nanovllm.kernels.plain.kv_codes import dequantize

            rows = dequantize(rows, scales[blocks].transpose(1, 2), dtype)
        found.append(rows.view(len(tables), -1, *cache.shape[2:]).transpose(1, 2))
    return found[0], found[-1]
