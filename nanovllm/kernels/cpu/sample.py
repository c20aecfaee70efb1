"""Sampling: one pass over the logits, for greedy and temperature rows together."""

import torch

from nanovllm.kernels.cpu.library import address, constant, function


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as the twin defines them. Reads the logits once."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    pieces = -(-vocab_size // constant("piece"))
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    ids, out = (logits.new_empty(num_rows * n, dtype=torch.int64) for n in (pieces, 1))
    if temperatures is None or keys is None:
        temperatures = keys = None
    else:
        assert temperatures.dtype == torch.float32 and keys.dtype == torch.int64
        assert temperatures.is_contiguous() and keys.is_contiguous()
    assert masks is None or (masks.dtype == torch.int32 and masks.stride(1) == 1)
    function("sample", logits.dtype)(
        logits.data_ptr(), logits.stride(0), address(temperatures), address(keys), address(masks),
        0 if masks is None else masks.stride(0), out.data_ptr(), best.data_ptr(), ids.data_ptr(),
        num_rows, vocab_size, torch.get_num_threads(),
    )  # fmt: skip
    return out
