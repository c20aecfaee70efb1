"""Masks: bitmaps of the tokens that may be drawn."""

import torch

from nanovllm.kernels.plain.sample import sample

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


def sample_masked(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    rows: torch.Tensor,
    bitmaps: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Write the token ids of the rows `rows` [R] to `token_ids` [B]: `sample` from allowed tokens.

    `mask` defines the bitmaps [R, W]. A row without allowed tokens gives NO_TOKEN. Rows of -1 are
    skipped. Peak memory: that of `mask` and `sample`, and a float32 copy of these rows.
    """
    if bool((rows < 0).any()):
        rows, bitmaps = rows[rows >= 0], bitmaps[rows >= 0]
    if not len(rows):
        return
    part = logits[rows].to(torch.float32)
    mask(part, bitmaps)
    if temperatures is None or keys is None:
        token_ids[rows] = sample(part, None, None)
    else:
        token_ids[rows] = sample(part, temperatures[rows], keys[rows])
