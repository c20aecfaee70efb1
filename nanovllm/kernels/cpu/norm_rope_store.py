"""Norm, rotate and store: from a step's projections to the inputs of attention."""

from typing import Any

import torch

from nanovllm.kernels.cpu.library import MAX_HEAD_DIM, address, function
from nanovllm.kernels.cpu.rms_norm import of_weight
from nanovllm.kernels.kv_layer import CODES, KVLayer
from nanovllm.kernels.plain.norm_rope_store import Rope


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

    Reads qkv once; writes queries and values once, and keys twice. With a quantized cache, values
    are also written twice, and the cached codes are smaller.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    cos, sin = rope
    assert 2 * cos.shape[2] <= head_dim
    k_cache, v_cache = kv.k_cache, kv.v_cache
    quantized = kv.k_scales is not None
    of_cache = CODES if quantized else qkv.dtype
    assert k_cache.dtype == v_cache.dtype == of_cache or kv.is_empty
    assert head_dim <= MAX_HEAD_DIM
    assert cos.dtype == sin.dtype == torch.float32 and slots.dtype == torch.int64
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and slots.is_contiguous()
    assert cos.stride() == sin.stride() and cos.stride(2) == 1
    num_q_heads = num_heads - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    k = qkv.new_empty(num_tokens, num_kv_heads, head_dim)
    v = qkv[:, num_q_heads + num_kv_heads :]
    q_weight, k_weight = norms if norms is not None else (None, None)
    assert norms is None or norms[0].dtype == norms[1].dtype
    name = "norm_rope_store"
    k_address = None if kv.is_empty else k_cache.data_ptr()
    caches: tuple[Any, ...] = (k_address, v_cache.data_ptr())
    if quantized:
        v = torch.empty_like(k)
        scales = address(kv.k_scales), address(kv.v_scales), *(kv.fixed_scales or (0.0, 0.0))
        name, caches = f"{name}_codes", (v.data_ptr(), *caches, *scales, k_cache.shape[1])
    function(of_weight(name, q_weight, qkv), qkv.dtype)(
        qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        address(q_weight), address(k_weight), eps, q.data_ptr(), k.data_ptr(), *caches,
        slots.data_ptr(), num_tokens, num_q_heads, num_kv_heads, head_dim, cos.shape[2],
        torch.get_num_threads(),
    )  # fmt: skip
    return q, k, v
