"""Masks: minus infinity over the logits of tokens that may not be drawn."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv

BLOCK = 4096


@triton.jit
def bits_of(masks_ptr, ids, inside):  # type: ignore[no-untyped-def]
    """Whether the tokens `ids` of a row may be drawn, whose words begin at `masks_ptr`."""
    words = tl.load(masks_ptr + ids // 32, mask=inside, other=0)
    return inside & (((words >> (ids % 32)) & 1) > 0)


@triton.jit
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, masks_ptr, logits_stride, masks_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program masks a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    excluded = inside & (bits_of(masks_ptr + row * masks_stride, ids, inside) == 0)
    tl.store(logits_ptr + row * logits_stride + ids, -float("inf"), mask=excluded)


def mask(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Write minus infinity over the logits [B, V] of other tokens. Reads the masks alone."""
    assert logits.stride(1) == masks.stride(1) == 1
    num_rows, vocab_size = logits.shape
    _mask_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits, masks, logits.stride(0), masks.stride(0), vocab_size, BLOCK=BLOCK, num_warps=8
    )
