"""A short convolution over the tokens of each sequence, one filter for each channel."""

import torch

from nanovllm.kernels.cpu.library import address, constant, function
from nanovllm.kernels.cpu.state_arguments import state_arguments
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain import causal_conv as plain


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    silu: bool,
) -> torch.Tensor:
    """As the plain definition, which computes more than 8 taps. Reads and writes all once."""
    num_rows, num_channels = x.shape
    taps = weight.shape[1]
    if taps > constant("most_taps"):
        return plain.causal_conv(x, weight, bias, states, step, silu)
    assert weight.shape == (num_channels, taps) and taps > 1
    assert states.shape[1:] == (taps - 1, num_channels)
    assert x.dtype == weight.dtype == states.dtype and x.stride(1) == 1 and weight.is_contiguous()
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    out = x.new_empty(num_rows, num_channels)
    function("causal_conv", x.dtype)(
        x.data_ptr(), x.stride(0), weight.data_ptr(), address(bias), out.data_ptr(),
        *state_arguments(states, step, num_rows), num_channels, taps, silu,
        torch.get_num_threads(),
    )  # fmt: skip
    return out
