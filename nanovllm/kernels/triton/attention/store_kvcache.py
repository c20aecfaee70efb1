"""Write a step's keys and values to the paged cache."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.triton.attention.kv_codes import (
    as_bytes,
    codes_of,
    fixed_scales,
    largest_of,
    scale_of,
    values_of,
)


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, k_fixed, v_fixed,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    num_heads, block_size, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STORE: tl.constexpr,
    QUANTIZED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program moves one token's K and V of one head; slots are first widened to 64 bits."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64) if STORE else -1
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    key_at = key_ptr + token * key_token_stride + head * key_head_stride + d
    value_at = value_ptr + token * value_token_stride + head * value_head_stride + d
    to = (slot * num_heads + head) * HEAD_DIM + d
    if QUANTIZED:
        key = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)
        k_scale = scale_of(largest_of(key, 0), k_fixed)
        v_scale = scale_of(largest_of(value, 0), v_fixed)
        k_codes, v_codes = codes_of(key, k_scale), codes_of(value, v_scale)
        out_at = (token * num_heads + head) * HEAD_DIM + d
        k_out = values_of(k_codes, k_scale).to(k_out_ptr.dtype.element_ty)
        v_out = values_of(v_codes, v_scale).to(v_out_ptr.dtype.element_ty)
        tl.store(k_out_ptr + out_at, k_out, mask=inside)
        tl.store(v_out_ptr + out_at, v_out, mask=inside)
        if slot >= 0:
            scale_at = (slot // block_size * num_heads + head) * block_size + slot % block_size
            tl.store(k_cache_ptr + to, k_codes, mask=inside)
            tl.store(v_cache_ptr + to, v_codes, mask=inside)
            tl.store(k_scales_ptr + scale_at, k_scale.to(tl.bfloat16))
            tl.store(v_scales_ptr + scale_at, v_scale.to(tl.bfloat16))
    elif slot >= 0:
        tl.store(k_cache_ptr + to, tl.load(key_at, mask=inside), mask=inside)
        if not SHARED:
            tl.store(v_cache_ptr + to, tl.load(value_at, mask=inside), mask=inside)


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, kv: KVLayer, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write key, value [T, KVH, D] to slots [T] of the caches, if there are any.

    A token with slot -1 is not written. Returns keys and values as the cache stores them: the same
    tensors, unless the cache is quantized. Inputs may be strided, except in their last dimension.
    Bytes moved: each key and value is read once and written once; with a quantized cache, also
    written as codes.
    """
    num_tokens, num_heads, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == 1
    quantized, k_out, v_out = kv.k_scales is not None, key, value
    if quantized:
        k_out, v_out = key.new_empty(key.shape), value.new_empty(value.shape)
    elif kv.is_empty:
        return key, value
    assert kv.k_cache.is_contiguous() and kv.v_cache.is_contiguous()
    _store_kernel[(num_tokens, num_heads)](
        key, value, as_bytes(kv.k_cache), as_bytes(kv.v_cache), slot_mapping,
        kv.k_scales, kv.v_scales, k_out, v_out, *fixed_scales(kv),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        num_heads, kv.k_cache.shape[1], HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim), STORE=not kv.is_empty, QUANTIZED=quantized,
        SHARED=kv.value_width is not None,
    )  # fmt: skip
    return k_out, v_out
