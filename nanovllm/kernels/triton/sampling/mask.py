"""Masks: bitmaps of the tokens that may be drawn. A program masks BLOCK tokens of a row."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv

WORD = tl.constexpr(32)  # tokens for which a word of a bitmap has bits
BLOCK = 4096


@triton.jit
def load_words(bitmap_ptr, first, vocab_size, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the words [WORDS] of the tokens from `first` on, which is a multiple of WORD."""
    n = first // WORD + tl.arange(0, WORDS)
    return tl.load(bitmap_ptr + n, mask=n * WORD < vocab_size, other=0)


@triton.jit
def are_allowed(words):  # type: ignore[no-untyped-def]
    """Whether each token may be drawn: [WORDS, WORD]."""
    return ((words[:, None] >> tl.arange(0, WORD)[None, :]) & 1) != 0


@triton.jit
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bitmaps_ptr, logits_stride, bitmaps_stride, vocab_size, WORDS: tl.constexpr,
):  # fmt: skip
    """Write minus infinity for tokens that may not be drawn; no logit is read."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WORDS * WORD
    words = load_words(bitmaps_ptr + row * bitmaps_stride, first, vocab_size, WORDS)
    ids = first + tl.arange(0, WORDS)[:, None] * WORD + tl.arange(0, WORD)[None, :]
    forbidden = (ids < vocab_size) & ~are_allowed(words)
    tl.store(logits_ptr + row * logits_stride + ids, -float("inf"), mask=forbidden)


def mask(logits: torch.Tensor, bitmaps: torch.Tensor) -> None:
    """Set the logits [R, V] of the tokens that may not be drawn to minus infinity, in place."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and bitmaps.stride(1) == 1
    _mask_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits, bitmaps, logits.stride(0), bitmaps.stride(0), vocab_size,
        WORDS=BLOCK // 32, num_warps=4,
    )  # fmt: skip
