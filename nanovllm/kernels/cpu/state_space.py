"""The state spaces of Mamba 2."""

import torch

from nanovllm.kernels.cpu.library import function
from nanovllm.kernels.cpu.state_arguments import state_arguments
from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.operands.state_step import StateStep


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    rates: SpaceRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """As the plain definition, with sums in the order that state_space.h says.

    Reads a sequence's states once, and writes them once for each token whose states are kept.
    """
    _, num_heads, head_dim, size = states.shape
    num_rows, width = xbc.shape
    groups = (width - num_heads * head_dim) // (2 * size)
    assert width == num_heads * head_dim + 2 * groups * size and num_heads % groups == 0
    assert dt.shape == (num_rows, num_heads) and dt.dtype == xbc.dtype
    assert xbc.stride(1) == dt.stride(1) == 1 and states.dtype == torch.float32
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in rates[:3])
    out = xbc.new_empty(num_rows, num_heads, head_dim)
    function("state_space", xbc.dtype)(
        xbc.data_ptr(), xbc.stride(0), dt.data_ptr(), dt.stride(0), rates.log_rate.data_ptr(),
        rates.bias.data_ptr(), rates.skip.data_ptr(), rates.low, rates.high, out.data_ptr(),
        *state_arguments(states, step, num_rows), groups, num_heads, head_dim, size,
        torch.get_num_threads(),
    )  # fmt: skip
    return out
