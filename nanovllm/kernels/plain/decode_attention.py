"""Attention of a decode step over the paged KV cache: one or a few queries for each sequence.

B sequences, K padded key length, H query heads, KVH key heads, G = H / KVH, D head dimension.
Sequences of similar length are padded to one size and computed together, so that a layer takes a
few calls for any batch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.kv_layer import KVLayer

# Lengths within this ratio share a group: padding costs less than another call per layer.
GROUP_RATIO = 1.5
SMALLEST_GROUP = 64


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of similar context lengths."""

    rows: torch.Tensor  # [B] rows of the batch
    tables: torch.Tensor  # [B, blocks each]
    lens: torch.Tensor  # [B, 1] context lengths
    hidden: torch.Tensor  # [B, K] True where there is no key


def group_by_length(lengths: list[tuple[int, ...]]) -> list[list[int]]:
    """Indices of `lengths`, grouped by similar size in each dimension."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, dims in enumerate(lengths):
        key = tuple(math.ceil(math.log(max(n, SMALLEST_GROUP), GROUP_RATIO)) for n in dims)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def plan_decode(
    context_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int, num_queries: int = 1
) -> list[DecodeGroup]:
    """Group a decode step's rows, except those of length 0. Syncs, except on the CPU.

    Each `num_queries` rows in order belong to one sequence, and share its row of `block_tables`.
    """
    lens = context_lens.tolist()
    rows = [row for row, length in enumerate(lens) if length]
    groups = []
    for members in group_by_length([(lens[row],) for row in rows]):
        member_rows = torch.tensor([rows[i] for i in members], device=context_lens.device)
        num_blocks = -(-max(lens[rows[i]] for i in members) // block_size)
        keys = torch.arange(num_blocks * block_size, device=context_lens.device)
        member_lens = context_lens[member_rows, None]
        groups.append(
            DecodeGroup(
                rows=member_rows,
                tables=block_tables[member_rows // num_queries, :num_blocks],
                lens=member_lens,
                hidden=keys >= member_lens,
            )
        )
    return groups


def decode_attention(
    q: torch.Tensor, kv: KVLayer, plan: list[DecodeGroup], hides_nan: bool = False
) -> torch.Tensor:
    """Attention of one query per row, q [B, H, D], to its context; a row of length 0 gives zeros.

    Blocks before the window are not read. A mask does not hide keys and values that are NaN, which
    another sequence may have left: on a CPU, where a result shows it, they are set to zero first.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv.k_cache.shape[1:3]
    out = torch.zeros_like(q)
    for group in plan:
        batch_size = len(group.rows)
        # A KV head's G queries become G query positions, so that its keys are read once.
        queries = q[group.rows].view(batch_size, num_kv_heads, -1, head_dim)
        tables, hidden = group.tables, group.hidden
        if kv.window is not None:
            from nanovllm.kernels.plain.window import decode_window

            tables, hidden = decode_window(tables, group.lens, kv.window, block_size)
        keys, values = gather_blocks(kv, tables, q.dtype)
        if hides_nan:
            keys, values = (x.masked_fill(hidden[:, None, :, None], 0) for x in (keys, values))
        if not kv.needs:
            mask = queries.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask[:, None, None], scale=kv.scale
            )
        else:
            from nanovllm.kernels.plain.scores import attend_by_scores

            attended = attend_by_scores(queries, keys, values, ~hidden[:, None, None], kv)
        out[group.rows] = attended.reshape(batch_size, num_heads, head_dim)
    if q.is_cpu and not hides_nan and not abs(float(out.sum())) < math.inf:
        return decode_attention(q, kv, plan, hides_nan=True)
    return out[..., : kv.value_width]


def gather_blocks(
    kv: KVLayer, tables: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy blocks of the caches into rows: keys and values [B, KVH, K, D] of the type `dtype`."""
    found: list[torch.Tensor] = []
    blocks = tables.flatten()
    for cache, scales in ((kv.k_cache, kv.k_scales), (kv.v_cache, kv.v_scales)):
        if found and kv.value_width is not None and kv.k_scales is kv.v_scales:
            break
        rows = cache.flatten(1).index_select(0, blocks).view(-1, *cache.shape[1:])
        if scales is not None:
            from nanovllm.kernels.plain.kv_codes import dequantize

            rows = dequantize(rows, scales[blocks].transpose(1, 2), dtype)
        found.append(rows.view(len(tables), -1, *cache.shape[2:]).transpose(1, 2))
    return found[0], found[-1]
