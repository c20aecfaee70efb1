"""The paged KV cache in plain PyTorch: the definition, and what runs where nothing is compiled.

Letters: T query tokens, B sequences, Q and K padded query and key lengths, H query heads, KVH key
heads, G = H / KVH, D head dimension. Sequences of like length are padded into one group, so that a
layer costs a few calls, whatever the batch. The groups are planned once a step, for all layers.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Lengths within this ratio share a group: padding costs less than another call per layer.
GROUP_RATIO = 1.5
SMALLEST_GROUP = 64
# Elements of one explicit mask: bounds the memory of chunks that attend to long cached prefixes.
MAX_MASK_ELEMENTS = 1 << 24


@dataclass(slots=True)
class PrefillGroup:
    """Sequences of like query and key lengths."""

    q_rows: torch.Tensor  # [B, Q] rows of q; padding repeats a row
    k_rows: torch.Tensor | None  # [B, K] rows of k where nothing is cached
    tables: torch.Tensor | None  # [B, ceil(K / block_size)] blocks of the cache otherwise
    q_starts: torch.Tensor  # [B] position of each first query
    k_lens: torch.Tensor  # [B]
    num_keys: int  # K


@dataclass(slots=True)
class PrefillPlan:
    """All groups, and where each token's output stands among theirs: [T]."""

    groups: list[PrefillGroup]
    out_rows: torch.Tensor


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of like context lengths."""

    rows: torch.Tensor  # [B] rows of the batch
    tables: torch.Tensor  # [B, blocks each]
    lens: torch.Tensor  # [B, 1] context lengths
    hidden: torch.Tensor  # [B, K] True where there is no key


def store_kvcache_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What `store_kvcache` does, in plain PyTorch. Syncs where the device is not the CPU."""
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value


def group_by_length(lengths: list[tuple[int, ...]]) -> list[list[int]]:
    """Indices of `lengths`, those of like size in each dimension together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, dims in enumerate(lengths):
        key = tuple(math.ceil(math.log(max(n, SMALLEST_GROUP), GROUP_RATIO)) for n in dims)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def plan_prefill(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_tables: torch.Tensor | None,
    block_size: int,
) -> PrefillPlan:
    """Group a prefill step's sequences. Syncs where the device is not the CPU."""
    device = cu_seqlens_q.device
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    q_lens = [end - start for start, end in itertools.pairwise(q_ends)]
    k_lens = [end - start for start, end in itertools.pairwise(k_ends)]
    groups: list[PrefillGroup] = []
    out_rows = torch.empty(q_ends[-1], dtype=torch.long, device=device)
    num_out = 0
    for members in group_by_length(list(zip(q_lens, k_lens, strict=True))):
        num_queries = max(q_lens[i] for i in members)
        num_keys = max(k_lens[i] for i in members)
        starts = torch.tensor([q_ends[i] for i in members], device=device)
        lens = torch.tensor([q_lens[i] for i in members], device=device)
        within = torch.arange(num_queries, device=device).expand(len(members), -1)
        q_rows = starts[:, None] + torch.minimum(within, lens[:, None] - 1)
        out = num_out + torch.arange(q_rows.numel(), device=device).view_as(q_rows)
        real = within < lens[:, None]
        out_rows[q_rows[real]] = out[real]
        num_out += q_rows.numel()
        tables = None
        if block_tables is not None:
            tables = block_tables[members, : -(-num_keys // block_size)]
        groups.append(
            PrefillGroup(
                q_rows=q_rows,
                k_rows=q_rows if block_tables is None else None,
                tables=tables,
                q_starts=torch.tensor([k_lens[i] - q_lens[i] for i in members], device=device),
                k_lens=torch.tensor([k_lens[i] for i in members], device=device),
                num_keys=num_keys,
            )
        )
    return PrefillPlan(groups, out_rows)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if a part is there.

    With a window a query sees its own key and those right before it, so many in all. Blocks that no
    query sees are not read.
    """
    outs = []
    for group in plan.groups:
        queries = q[group.q_rows].transpose(1, 2)  # [B, H, Q, D]
        k_starts = torch.zeros_like(group.q_starts)
        if group.k_rows is None:
            assert group.tables is not None
            tables = group.tables
            if window is not None:
                tables, k_starts = seen_blocks(
                    tables, group.k_lens, group.q_starts + 1 - window,
                    window - 1 + queries.shape[2], k_cache.shape[1],
                )  # fmt: skip
            keys, values = (gather_blocks(x, tables) for x in (k_cache, v_cache))
        else:
            # Padding stands behind the real keys, and the causal mask hides what stands behind.
            keys, values = (x[group.k_rows].transpose(1, 2) for x in (k, v))
        if group.k_rows is not None and (window is None or group.num_keys <= window):
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            out = _attend_in_slices(queries, keys, values, group.q_starts, k_starts, scale, window)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [B * Q, H, D]
    return torch.cat(outs)[plan.out_rows]


def _attend_in_slices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Queries [B, H, Q, D] that start anywhere in a context, in slices that bound the mask."""
    batch_size, _, num_queries, _ = queries.shape
    offsets = torch.arange(keys.shape[2], device=queries.device)
    key_positions = k_starts[:, None, None, None] + offsets  # [B, 1, 1, K]
    step = max(1, MAX_MASK_ELEMENTS // (batch_size * keys.shape[2]))
    outs = []
    for start in range(0, num_queries, step):
        slice_ = queries[:, :, start : start + step]
        offsets = torch.arange(start, start + slice_.shape[2], device=queries.device)
        positions = q_starts[:, None, None, None] + offsets[:, None]  # [B, 1, Q, 1]
        mask = key_positions <= positions
        if window is not None:
            mask &= key_positions > positions - window
        outs.append(
            F.scaled_dot_product_attention(
                slice_, keys, values, attn_mask=mask, scale=scale,
                enable_gqa=True,
            )
        )  # fmt: skip
    return torch.cat(outs, dim=2)


def plan_decode(
    context_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> list[DecodeGroup]:
    """Group a decode step's rows; those of length 0 are in none. Syncs as `plan_prefill` does."""
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
                tables=block_tables[member_rows, :num_blocks],
                lens=member_lens,
                hidden=keys >= member_lens,
            )
        )
    return groups


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: list[DecodeGroup],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one query per row, q [B, H, D], to its context; rows without one give zeros.

    With a window, to the last so many keys of it; blocks before them are not read.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    out = torch.zeros_like(q)
    for group in plan:
        batch_size = len(group.rows)
        # A KV head's G queries stand as G query positions, so that its keys are read once.
        queries = q[group.rows].view(batch_size, num_kv_heads, -1, head_dim)
        tables, hidden = group.tables, group.hidden
        if window is not None:
            first_keys = group.lens - window
            tables, starts = seen_blocks(
                tables, group.lens[:, 0], first_keys[:, 0], window, k_cache.shape[1]
            )
            offsets = torch.arange(tables.shape[1] * k_cache.shape[1], device=q.device)
            positions = starts[:, None] + offsets
            hidden = (positions < first_keys) | (positions >= group.lens)
        keys, values = (gather_blocks(x, tables) for x in (k_cache, v_cache))
        mask = queries.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[:, None, None], scale=scale
        )
        out[group.rows] = attended.reshape(batch_size, num_heads, head_dim)
    return out


def seen_blocks(
    tables: torch.Tensor,
    lens: torch.Tensor,
    first_keys: torch.Tensor,
    num_keys: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tables [B, blocks] those with `num_keys` keys from `first_keys` [B] on.

    And the positions [B] where they begin. A row's last block stands for those that it has not.
    """
    count = min(tables.shape[1], (num_keys - 2) // block_size + 2)  # wherever they begin
    firsts = first_keys.clamp(min=0) // block_size
    columns = firsts[:, None] + torch.arange(count, device=tables.device)
    lasts = (lens[:, None] - 1) // block_size
    return tables.gather(1, torch.minimum(columns, lasts).long()), firsts * block_size


def gather_blocks(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Copy blocks of `cache` [N, block_size, KVH, D] into rows: [B, KVH, K, D]."""
    num_kv_heads, head_dim = cache.shape[2:]
    rows = cache.flatten(1).index_select(0, tables.flatten())
    return rows.view(len(tables), -1, num_kv_heads, head_dim).transpose(1, 2)
