"""Causal attention of a prefill step, over the paged KV cache if a part is cached."""

import torch

from nanovllm.kernels.cpu.attention import (
    AttentionPlan,
    attend,
    attend_to_cache,
    plan_attention,
)
from nanovllm.kernels.kv_layer import KVLayer


def plan_prefill(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_tables: torch.Tensor | None,
    group: int,
    head_dim: int,
) -> AttentionPlan:
    """Plan a prefill step's attention."""
    return plan_attention(cu_seqlens_q, cu_seqlens_k.diff(), block_tables, group, head_dim)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: KVLayer,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if a part is cached.

    With a window, a query attends to the last `window` keys up to its own. Scores and weights are
    float32. Keys and values are read once for the 16 or 32 rows of a tile.
    """
    if plan.block_tables is not None:
        return attend_to_cache(q, kv, plan)
    return attend(q, k, v, 1, kv, plan)
