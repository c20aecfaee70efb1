"""Attention with a soft cap on the scores. It is loaded when a layer has one."""

import math

import torch

from nanovllm.kernels.kv_layer import KVLayer


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
