"""The gated delta rule whose channels forget by themselves; gated_delta.py has the kernel."""

import torch

from nanovllm.kernels.operands.rates import ChannelRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.state.gated_delta import one_by_one


def channel_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: ChannelRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, Dv] of qkv [T, 2 * H * Dk + H * Dv], with a [T, H * Dk] and b [T, H].

    One launch, in prefills too: it computes a sequence's tokens one after the other. It reads a
    memory once, and writes it for each kept token.
    """
    _, num_heads, _, value_size = states.shape
    assert qkv.stride(1) == 1 and states[0].is_contiguous()
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    out = step.outputs(qkv, len(qkv), num_heads, value_size)
    parts = None if step.ends is None else step.chunks.parts
    one_by_one(qkv, a, b, rates, states, step, parts, out)
    return out
