"""The ends of queries, and rows for the cache of latent attention, in one launch.

T tokens, H query heads, K numbers of a latent, R rotated ones.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.plain.norm_rope_store import Rope

HEADS = 16  # of a program


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    from_ptr, to_ptr, mask, cos, sin, pair, R: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Rotate the pairs of heads, which begin at the pointers [heads, 1]."""
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else R // 2)
    x1 = tl.load(from_ptr + first[None, :], mask=mask, other=0.0)
    x2 = tl.load(from_ptr + second[None, :], mask=mask, other=0.0)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    out1, out2 = wide1 * cos - wide2 * sin, wide2 * cos + wide1 * sin
    tl.store(to_ptr + pair[None, :], out1.to(x1.dtype), mask=mask)
    tl.store(to_ptr + pair[None, :] + R // 2, out2.to(x1.dtype), mask=mask)


@triton.jit
def _latent_rows_kernel(  # type: ignore[no-untyped-def]
    ends_ptr, row_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, rows_ptr, eps,
    ends_token, ends_head, row_token, out_token, out_head, rope_stride,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A program computes some heads of a token, and the last one the token's row."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_R)
    inside = pair < R // 2
    cos = tl.load(cos_ptr + token * rope_stride + pair, mask=inside, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * rope_stride + pair, mask=inside, other=0.0)[None, :]
    if tl.program_id(1) + 1 < tl.num_programs(1):
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (head < H) & inside[None, :]
        end_at = ends_ptr + token * ends_token + head * ends_head
        end_to = out_ptr + token * out_token + head * out_head
        _rotate(end_at, end_to, mask, cos, sin, pair, R, INTERLEAVED)
    else:
        number = tl.arange(0, BLOCK_K)
        latent = tl.load(row_ptr + token * row_token + number, mask=number < K, other=0.0)
        weight = tl.load(weight_ptr + number, mask=number < K, other=0.0).to(tl.float32)
        values = latent.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
        normed = (values * scale * weight).to(latent.dtype)
        to = rows_ptr + token * (K + R)
        tl.store(to + number, normed, mask=number < K)
        zero = tl.zeros([1, 1], dtype=tl.int64)
        key_at, key_to = row_ptr + token * row_token + K + zero, to + K + zero
        _rotate(key_at, key_to, inside[None, :], cos, sin, pair, R, INTERLEAVED)


def latent_rows(
    ends: torch.Tensor, row: torch.Tensor, weight: torch.Tensor, eps: float, rope: Rope,
    interleaved: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rotate the ends of queries [T, H, R] to `out`; rows [T, 1, K + R] of projections [T, K + R].

    Reads each input once, and writes each result once.
    """
    num_tokens, num_heads, rotated = ends.shape
    (cos, sin), size = rope, len(weight)
    assert ends.stride(2) == row.stride(1) == out.stride(2) == cos.stride(2) == 1
    assert cos.stride() == sin.stride()
    rows = row.new_empty(num_tokens, 1, size + rotated)
    block_h = min(HEADS, next_power_of_2(num_heads))
    _latent_rows_kernel[(num_tokens, cdiv(num_heads, block_h) + 1)](
        ends, row, weight, cos, sin, out, rows, eps,
        *ends.stride()[:2], row.stride(0), *out.stride()[:2], cos.stride(0),
        H=num_heads, K=size, R=rotated, INTERLEAVED=interleaved,
        BLOCK_H=block_h, BLOCK_K=next_power_of_2(size), BLOCK_R=next_power_of_2(rotated // 2),
        num_warps=2,
    )  # fmt: skip
    return rows
