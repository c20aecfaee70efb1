"""The gate of an attention layer's output."""

import torch

from nanovllm.kernels.cpu.library import DTYPES, function
from nanovllm.kernels.plain.sigmoid_and_mul import sigmoid_and_mul as plain


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, N] times sigmoid(gate), which is rounded to its type first. It replaces x.

    Gates of another type or shape are multiplied by plain PyTorch.
    """
    if gate.dtype != x.dtype or gate.shape != x.shape or x.dtype not in DTYPES:
        return plain(x, gate)
    assert x.stride(1) == gate.stride(1) == 1
    function("sigmoid_and_mul", x.dtype)(
        x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), *x.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return x
