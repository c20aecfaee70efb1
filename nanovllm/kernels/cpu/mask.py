"""Masks: minus infinity over the logits of tokens that may not be drawn."""

import torch

from nanovllm.kernels.cpu.library import function


def mask(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Write minus infinity over the logits [B, V] of other tokens, in float32."""
    assert logits.stride(1) == masks.stride(1) == 1 and masks.dtype == torch.int32
    function("mask", logits.dtype)(
        logits.data_ptr(), logits.stride(0), masks.data_ptr(), masks.stride(0), *logits.shape,
        torch.get_num_threads(),
    )  # fmt: skip
