"""Norm, rotate and store: from a step's projections to the inputs of attention.

T tokens, H query heads, KVH key heads, D head dimension; R elements of a head are rotated.
"""

import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain.rms_norm import rms_norm
from nanovllm.kernels.plain.store_kvcache import store_kvcache

# Cosines and sines of a step's tokens, [T, 1, R / 2] each.
Rope = tuple[torch.Tensor, torch.Tensor]


def norm_rope_store(
    qkv: torch.Tensor,
    num_kv_heads: int,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    kv: KVLayer,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], keys and values [T, KVH, D] of qkv [T, H + 2 * KVH, D].

    Queries and keys are normalised with the weights `norms`, if given, and rotated. Keys and values
    are also written to their slots of the cache (not if the slot is -1), and returned as the cache
    stores them: values as a view, unless the cache is quantized.
    """
    heads = [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.split(qkv, heads, dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = rotate(q, rope), rotate(k, rope)
    return q, *store_kvcache(k, v, kv, slots)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the first R elements of each head of x [T, H, D], as pairs (i, i + R / 2).

    In float32 inside. The elements after the first R are copied.
    """
    cos, sin = rope
    half = cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x1, x2, rest = x.float().tensor_split((half, 2 * half), dim=-1)
    out1, out2, out_rest = out.tensor_split((half, 2 * half), dim=-1)
    out1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
    out2.copy_((x2 * cos).addcmul_(x1, sin))
    if rest.shape[-1]:
        out_rest.copy_(rest)
    return out
