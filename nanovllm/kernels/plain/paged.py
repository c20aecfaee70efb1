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
