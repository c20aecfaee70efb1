"""RMSNorm, with or without the residual add before it. T rows of N elements."""

import torch

from nanovllm.kernels.cpu.library import function


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of each row of x [T, N], in float32 inside. Reads [T, N] once, writes it once."""
    num_rows, size = x.shape
    assert weight.shape == (size,)
    assert x.stride(1) == weight.stride(0) == 1
    out = x.new_empty(num_rows, size)
    function(of_weight("rms_norm", weight, x), x.dtype)(
        x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), out.data_ptr(), None, num_rows, size,
        eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def of_weight(name: str, weight: torch.Tensor | None, x: torch.Tensor) -> str:
    """The name of a function for weights of the type of x, or for weights in float32."""
    if weight is None or weight.dtype == x.dtype:
        return name
    assert weight.dtype == torch.float32
    return f"{name}_wide"


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual`, and the rounded sum. Reads [T, N] twice, writes it twice."""
    num_rows, size = x.shape
    assert x.dtype == residual.dtype and residual.shape == x.shape
    assert weight.shape == (size,)
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1
    out, total = x.new_empty(num_rows, size), x.new_empty(num_rows, size)
    function(of_weight("rms_norm", weight, x), x.dtype)(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
        out.data_ptr(), total.data_ptr(), num_rows, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out, total
