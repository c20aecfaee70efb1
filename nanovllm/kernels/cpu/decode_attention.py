"""Attention of a decode step over the paged KV cache: one query for each sequence."""

import torch

from nanovllm.kernels.cpu.attention import AttentionPlan, attend_to_cache, plan_attention
from nanovllm.kernels.kv_layer import KVLayer


def plan_decode(
    context_lens: torch.Tensor, block_tables: torch.Tensor, group: int, head_dim: int
) -> AttentionPlan:
    """Plan a decode step's attention."""
    q_ends = torch.arange(len(context_lens) + 1, dtype=torch.int32)
    return plan_attention(q_ends, context_lens, block_tables, group, head_dim)


def decode_attention(
    q: torch.Tensor,
    kv: KVLayer,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Attention of q [B, H, D] to its contexts; a row of length 0 gives zeros.

    Bytes moved: the KV of all contexts once, or only the KV in the window.
    """
    return attend_to_cache(q, kv, plan)
