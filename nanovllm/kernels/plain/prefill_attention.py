"""Causal attention of a prefill step, over the paged KV cache if a part is cached.

T query tokens, B sequences, Q and K padded query and key lengths, H query heads, KVH key heads,
D head dimension. The plan groups a step's sequences once for all layers.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain.decode_attention import gather_blocks, group_by_length


@dataclass(slots=True)
class PrefillGroup:
    """Sequences of similar query and key lengths."""

    q_rows: torch.Tensor  # [B, Q] rows of q; padding repeats a row
    k_rows: torch.Tensor | None  # [B, K] rows of k where nothing is cached
    tables: torch.Tensor | None  # [B, ceil(K / block_size)] blocks of the cache, if any
    q_starts: torch.Tensor  # [B] position of each first query
    k_lens: torch.Tensor  # [B]
    num_keys: int  # K


@dataclass(slots=True)
class GroupedPrefillPlan:
    """All groups, and where each token's output is among the groups' outputs: `out_rows` [T]."""

    groups: list[PrefillGroup]
    out_rows: torch.Tensor


def plan_prefill(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_tables: torch.Tensor | None,
    block_size: int,
) -> GroupedPrefillPlan:
    """Group a prefill step's sequences. Syncs, except on the CPU."""
    device = cu_seqlens_q.device
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    q_lens = [end - start for start, end in itertools.pairwise(q_ends)]
    k_lens = [end - start for start, end in itertools.pairwise(k_ends)]
    groups: list[PrefillGroup] = []
    out_rows = torch.empty(q_ends[-1], dtype=torch.long, device=device)
    num_out = 0
    alike = group_by_length(list(zip(q_lens, k_lens, strict=True)))
    for members in filter(None, ([i for i in each if q_lens[i]] for each in alike)):
        num_queries = max(q_lens[i] for i in members)
        num_keys = max(k_lens[i] for i in members)
        starts, lens = (
            torch.tensor([values[i] for i in members], device=device) for values in (q_ends, q_lens)
        )
        q_rows, real = _padded_rows(starts, lens, num_queries)
        out = num_out + torch.arange(q_rows.numel(), device=device).view_as(q_rows)
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
    return GroupedPrefillPlan(groups, out_rows)


def _padded_rows(
    starts: torch.Tensor, lens: torch.Tensor, num_queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, Q] of each sequence's queries, padded with its last one, and which rows are real."""
    within = torch.arange(num_queries, device=starts.device).expand(len(starts), -1)
    return starts[:, None] + torch.minimum(within, lens[:, None] - 1), within < lens[:, None]


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: KVLayer,
    plan: GroupedPrefillPlan,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if a part is cached.

    Blocks that no query sees are not read. Rows after the last sequence's are 0.
    """
    window, outs = kv.window, [q[:0]]
    for group in plan.groups:
        queries = q[group.q_rows].transpose(1, 2)  # [B, H, Q, D]
        k_starts = torch.zeros_like(group.q_starts)
        if group.k_rows is None:
            assert group.tables is not None
            tables = group.tables
            if window is not None:
                from nanovllm.kernels.plain.window import seen_blocks

                tables, k_starts = seen_blocks(
                    tables, group.k_lens, group.q_starts + 1 - window,
                    window - 1 + queries.shape[2], kv.k_cache.shape[1],
                )  # fmt: skip
            keys, values = gather_blocks(kv, tables, q.dtype)
        else:
            # Padding follows the real keys, and the causal mask hides it.
            keys, values = (x[group.k_rows].transpose(1, 2) for x in (k, v))
        is_causal = group.k_rows is not None and (window is None or group.num_keys <= window)
        if is_causal and not kv.needs:
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=kv.scale, enable_gqa=True
            )
        else:
            from nanovllm.kernels.plain.masked_attention import attend_in_slices

            starts = group.q_starts, k_starts, group.k_lens
            out = attend_in_slices(queries, keys, values, *starts, kv)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [B * Q, H, D]
    out = torch.cat(outs)[plan.out_rows][..., : kv.value_width]
    num_unused = len(q) - len(out)
    return F.pad(out, (0, 0, 0, 0, 0, num_unused)) if num_unused else out
