"""Masks: bitmaps of the tokens that may be drawn.

B rows, V tokens. A mask [B, W] in int32 has W = V / 32 words a row, rounded up. Token i may be
drawn if bit i % 32 of word i // 32 is set. Bits behind the last token have no meaning.
"""

import torch

WORD = 32  # bits


def allowed(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The bits [B, V] as booleans."""
    places = torch.arange(WORD, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> places) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def mask(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Write minus infinity over the logits [B, V] of other tokens."""
    logits.masked_fill_(~allowed(masks, logits.shape[1]), -torch.inf)
