"""Norms of query and key heads that no kernel of attention fuses."""

from typing import Any

import torch


def normed_heads(qkv: torch.Tensor, num_kv_heads: int, norms: tuple[Any, Any]) -> torch.Tensor:
    """Normalize queries and keys of [T, H + 2 * KVH, D], one launch for each."""
    sizes = [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.split(qkv, sizes, dim=1)
    q, k = (
        norm(heads.reshape(-1, heads.shape[-1])).view(heads.shape)
        for heads, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat([q, k, v], dim=1)
