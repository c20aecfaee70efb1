"""RMS norms of groups of channels, with a gate before or after."""

import torch

from nanovllm.kernels.cpu.library import function


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """As the plain definition. Reads [T, G, D] twice, writes it once."""
    rows, groups, size = x.shape
    assert gate.shape == x.shape and weight.shape in ((size,), (groups, size))
    assert x.dtype == gate.dtype == weight.dtype and weight.is_contiguous()
    assert x.stride(2) == gate.stride(2) == 1
    assert groups == 1 or x.stride(1) == gate.stride(1) == size
    out = x.new_empty(rows, groups, size)
    function("gated_norm", x.dtype)(
        x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), weight.data_ptr(),
        size * (weight.dim() - 1), out.data_ptr(), rows, groups, size, eps, gate_first,
        torch.get_num_threads(),
    )  # fmt: skip
    return out
