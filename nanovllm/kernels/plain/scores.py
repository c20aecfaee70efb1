"""Attention that needs the scores themselves: a soft cap on them, or sinks next to them.

It is loaded when a layer has one of these.
"""

import math

import torch

from nanovllm.kernels.kv_layer import KVLayer


def attend_by_scores(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, kv: KVLayer
) -> torch.Tensor:
    """Attention of queries [B, H, Q, D] with a soft cap or sinks, at least in float32.

    `seen` [B, H, Q, K] is true for the scores that count; its sizes may be 1. Queries may be
    [B, KVH, G, D], too: all heads are in the two dimensions H and Q, or only in H.
    """
    num_kv_heads, shape = keys.shape[1], queries.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = queries.to(wide).reshape(shape[0], num_kv_heads, -1, shape[3])
    scores = (rows @ keys.to(wide).transpose(2, 3)).view(*shape[:3], -1) * kv.scale
    if kv.soft_cap is not None:
        scores = torch.tanh(scores / kv.soft_cap) * kv.soft_cap
    scores = scores.masked_fill_(~seen, -math.inf)
    weights = scores.softmax(-1) if kv.sinks is None else _with_sinks(scores, kv.sinks)
    out = weights.view(shape[0], num_kv_heads, -1, keys.shape[2]) @ values.to(wide)
    return out.view(shape).to(queries.dtype)


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The softmax of scores [B, H, Q, K] and their head's sink, without the sink's weight."""
    of_heads = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)
    column = of_heads.expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
