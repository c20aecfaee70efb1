"""Masks: bitmaps of the tokens that may be drawn."""

import torch

from nanovllm.kernels.cpu.library import function


def mask(logits: torch.Tensor, bitmaps: torch.Tensor) -> None:
    """Set the logits [R, V] of the tokens that may not be drawn to minus infinity, in place."""
    assert logits.dtype == torch.float32 and bitmaps.dtype == torch.int32
    assert logits.stride(1) == 1 and bitmaps.stride(1) == 1
    function("mask")(
        logits.data_ptr(), logits.stride(0), bitmaps.data_ptr(), bitmaps.stride(0),
        *logits.shape, torch.get_num_threads(),
    )  # fmt: skip
