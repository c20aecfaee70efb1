"""The gated delta rule in which each channel of keys forgets by itself."""

import torch

from nanovllm.kernels.cpu.library import function
from nanovllm.kernels.cpu.state_arguments import state_arguments
from nanovllm.kernels.operands.rates import ChannelRates
from nanovllm.kernels.operands.state_step import StateStep


def channel_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: ChannelRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """As the plain definition, with sums in the order that gated_delta.h says.

    Reads a sequence's memories once, and writes them once for each token whose memories are kept.
    """
    _, num_heads, key_size, value_size = states.shape
    num_rows, keys = len(qkv), num_heads * key_size
    assert qkv.shape == (num_rows, 2 * keys + num_heads * value_size)
    assert a.shape == (num_rows, keys) and b.shape == (num_rows, num_heads)
    assert qkv.dtype == a.dtype == b.dtype and qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    assert rates.log_rate.dtype == rates.bias.dtype == states.dtype == torch.float32
    assert rates.log_rate.is_contiguous() and rates.bias.is_contiguous()
    lowest = rates.lowest or 0.0  # 0: there is none
    out = qkv.new_empty(num_rows, num_heads, value_size)
    function("channel_delta", qkv.dtype)(
        qkv.data_ptr(), qkv.stride(0), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0),
        rates.log_rate.data_ptr(), rates.bias.data_ptr(), lowest, out.data_ptr(),
        *state_arguments(states, step, num_rows), num_heads, num_heads, key_size, value_size,
        torch.get_num_threads(),
    )  # fmt: skip
    return out
