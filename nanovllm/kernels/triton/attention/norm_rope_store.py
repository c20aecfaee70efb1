"""Norm, rotate and store in one launch: from a step's projections to the inputs of attention.

T tokens, H query heads, KVH key heads, D head dimension; R elements of a head are rotated. All
heads of a token are in one row: H queries, KVH keys, KVH values.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.triton.attention.kv_codes import (
    as_bytes,
    codes_of,
    fixed_scales,
    largest_of,
    scale_of,
    values_of,
)
from nanovllm.kernels.triton.common import await_inputs, early, let_next_begin

FEW_TOKENS = 128  # up to this many, several programs share a token's heads, to fill the device


@triton.jit
def _store_kv(  # type: ignore[no-untyped-def]
    k1, k2, v1, v2, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scales_ptr, v_scales_ptr,
    k_fixed, v_fixed, block_size, token, head, d1, d2, inside,
    D: tl.constexpr, KVH: tl.constexpr, STORE: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Write halves of heads: keys k1 and k2 for the first KVH, then values v1 and v2."""
    is_k = (head >= 0) & (head < KVH)
    is_v = (head >= KVH) & (head < 2 * KVH)
    v_head = head - KVH
    kept1, kept2 = k1, k2
    if QUANTIZED:
        wide1 = tl.where(is_k[:, None], k1, v1).to(tl.float32)
        wide2 = tl.where(is_k[:, None], k2, v2).to(tl.float32)
        largest = largest_of(tl.maximum(tl.abs(wide1), tl.abs(wide2), tl.PropagateNan.ALL), 1)
        scale = scale_of(largest, tl.where(is_k, k_fixed, v_fixed))
        codes1, codes2 = codes_of(wide1, scale[:, None]), codes_of(wide2, scale[:, None])
        kept1 = values_of(codes1, scale[:, None]).to(v1.dtype)
        kept2 = values_of(codes2, scale[:, None]).to(v1.dtype)
        v_at = v_ptr + token * KVH * D + v_head[:, None] * D
        tl.store(v_at + d1[None, :], kept1, mask=is_v[:, None] & inside[None, :])
        tl.store(v_at + d2[None, :], kept2, mask=is_v[:, None] & inside[None, :])
        k1, k2, v1, v2 = codes1, codes2, codes1, codes2
    k_at = k_ptr + token * KVH * D + head[:, None] * D
    tl.store(k_at + d1[None, :], kept1, mask=is_k[:, None] & inside[None, :])
    tl.store(k_at + d2[None, :], kept2, mask=is_k[:, None] & inside[None, :])
    slot = tl.load(slots_ptr + token).to(tl.int64) if STORE else -1
    if slot >= 0:
        k_to = k_cache_ptr + slot * KVH * D + head[:, None] * D
        tl.store(k_to + d1[None, :], k1, mask=is_k[:, None] & inside[None, :])
        tl.store(k_to + d2[None, :], k2, mask=is_k[:, None] & inside[None, :])
        v_to = v_cache_ptr + slot * KVH * D + v_head[:, None] * D
        tl.store(v_to + d1[None, :], v1, mask=is_v[:, None] & inside[None, :])
        tl.store(v_to + d2[None, :], v2, mask=is_v[:, None] & inside[None, :])
        if QUANTIZED:
            scale_at = slot // block_size * KVH * block_size + slot % block_size
            k_scale_to = k_scales_ptr + scale_at + head * block_size
            v_scale_to = v_scales_ptr + scale_at + v_head * block_size
            tl.store(k_scale_to, scale.to(tl.bfloat16), mask=is_k)
            tl.store(v_scale_to, scale.to(tl.bfloat16), mask=is_v)


@triton.jit
def _norm_rope_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_fixed, v_fixed,
    eps, qkv_stride, rope_stride, block_size,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program computes some heads of one token, as two halves with the elements of each pair.

    If R < D, the first R / 2 elements of a half are rotated; the other elements of the head are
    divided among the halves.
    """
    HALF: tl.constexpr = D // 2  # noqa: N806
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = d < HALF
    turns = d < R // 2
    d1, d2 = d, d + HALF
    if R < D:
        d1 = tl.where(turns, d, d + R // 2)
        d2 = tl.where(turns, d + R // 2, d + HALF)
    is_q = head < H
    real = (head < H + 2 * KVH)[:, None] & inside[None, :]
    await_inputs(EARLY)
    let_next_begin(EARLY)
    at = qkv_ptr + token * qkv_stride + head[:, None] * D
    raw1 = tl.load(at + d1[None, :], mask=real, other=0.0)
    raw2 = tl.load(at + d2[None, :], mask=real, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / D + eps)[:, None]
        q1 = tl.load(q_weight_ptr + d1, mask=inside, other=0.0).to(tl.float32)
        q2 = tl.load(q_weight_ptr + d2, mask=inside, other=0.0).to(tl.float32)
        k1 = tl.load(k_weight_ptr + d1, mask=inside, other=0.0).to(tl.float32)
        k2 = tl.load(k_weight_ptr + d2, mask=inside, other=0.0).to(tl.float32)
        # Rounded between norm and rotation, as in the plain definition.
        x1 = (x1 * scale * tl.where(is_q[:, None], q1[None, :], k1[None, :])).to(raw1.dtype)
        x2 = (x2 * scale * tl.where(is_q[:, None], q2[None, :], k2[None, :])).to(raw1.dtype)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    cos = tl.load(cos_ptr + token * rope_stride + d, mask=turns, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * rope_stride + d, mask=turns, other=0.0)[None, :]
    out1 = (x1 * cos - x2 * sin).to(raw1.dtype)
    out2 = (x2 * cos + x1 * sin).to(raw1.dtype)
    q_at = q_ptr + token * H * D + head[:, None] * D
    tl.store(q_at + d1[None, :], out1, mask=is_q[:, None] & inside[None, :])
    tl.store(q_at + d2[None, :], out2, mask=is_q[:, None] & inside[None, :])
    if (tl.program_id(1) + 1) * BLOCK_H > H:  # other programs have only queries
        _store_kv(out1, out2, raw1, raw2, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
                  k_scales_ptr, v_scales_ptr, k_fixed, v_fixed, block_size, token, head - H, d1, d2,
                  inside, D, KVH, STORE, QUANTIZED)  # fmt: skip


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
    stores them: values as a view, unless the cache is quantized. Bytes moved: qkv is read once;
    queries and values are written once, keys twice; with a quantized cache, values twice too.
    """
    block_h = 4 if len(qkv) <= FEW_TOKENS else 16
    return by_heads(block_h, qkv, num_kv_heads, rope, norms, eps, kv, slots)


def by_heads(
    block_h: int,
    qkv: torch.Tensor,
    num_kv_heads: int,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    kv: KVLayer,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm_rope_store`, by programs of `block_h` heads of a token each."""
    num_tokens, num_heads, head_dim = qkv.shape
    quantized = kv.k_scales is not None
    k_cache, v_cache = (qkv, qkv) if kv.is_empty else (as_bytes(kv.k_cache), as_bytes(kv.v_cache))
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
    assert kv.is_empty or (k_cache.is_contiguous() and v_cache.is_contiguous())
    num_q_heads = num_heads - 2 * num_kv_heads
    cos, sin = rope
    assert cos.stride() == sin.stride() and cos.stride(2) == 1
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    k = qkv.new_empty(num_tokens, num_kv_heads, head_dim)
    v = torch.empty_like(k) if quantized else qkv[:, num_q_heads + num_kv_heads :]
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    _norm_rope_store_kernel[(num_tokens, cdiv(num_heads, block_h))](
        qkv, q_weight, k_weight, cos, sin, q, k, k_cache, v_cache, slots,
        v, kv.k_scales, kv.v_scales, *fixed_scales(kv),
        eps, qkv.stride(0), cos.stride(0), k_cache.shape[1],
        H=num_q_heads, KVH=num_kv_heads, D=head_dim, R=2 * cos.shape[2],
        NORM=norms is not None, STORE=not kv.is_empty, QUANTIZED=quantized, BLOCK_H=block_h,
        BLOCK_D=next_power_of_2(head_dim // 2), num_warps=4, **early(qkv.device),
    )  # fmt: skip
    return q, k, v
