"""Writing a step's keys and values to the paged cache."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    num_heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program moves one token's K and V of one head; slots are widened to 64 bits first."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, BLOCK_D)
        inside = d < HEAD_DIM
        key_at = key_ptr + token * key_token_stride + head * key_head_stride + d
        value_at = value_ptr + token * value_token_stride + head * value_head_stride + d
        to = (slot * num_heads + head) * HEAD_DIM + d
        tl.store(k_cache_ptr + to, tl.load(key_at, mask=inside), mask=inside)
        tl.store(v_cache_ptr + to, tl.load(value_at, mask=inside), mask=inside)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key, value [T, KVH, D] to slots [T] of the caches [blocks, block_size, KVH, D].

    Slot -1 writes nothing. Inputs may be strided, except in their last dimension. Bytes moved: each
    key and value read once and written once.
    """
    num_tokens, num_heads, head_dim = key.shape
    assert key.stride(2) == value.stride(2) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    _store_kernel[(num_tokens, num_heads)](
        key, value, k_cache, v_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        num_heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
