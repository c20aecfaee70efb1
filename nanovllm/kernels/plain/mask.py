"""Masks: bitmaps of the tokens that may be drawn."""

import torch

BYTE = 8


def mask(logits: torch.Tensor, bitmaps: torch.Tensor) -> None:
    """Set the logits [R, V] of the tokens that may not be drawn to minus infinity, in place.

    `bitmaps` [R, W] in int32, W at least V / 32: bit i % 32 of word i // 32 is set if token i may
    be drawn. Bits after the last token are arbitrary. Peak memory: 2 bytes for each logit.
    """
    num_rows, vocab_size = logits.shape
    shifts = torch.arange(BYTE, dtype=torch.uint8, device=logits.device)
    bits = bitmaps.view(torch.uint8)[:, :, None] >> shifts
    bits &= 1
    logits.masked_fill_((bits == 0).view(num_rows, -1)[:, :vocab_size], -torch.inf)
