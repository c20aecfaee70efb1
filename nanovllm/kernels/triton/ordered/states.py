"""Short convolutions and norms with gates in one order of sums; `delta` and `space` have the rest.

A convolution adds its products one after the other, in decode steps and in prefills: what may
differ is which additions the compiler fuses, so it fuses none.
"""

import torch
import triton

from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.triton.attention.ordered import UNFUSED
from nanovllm.kernels.triton.state.causal_conv import convolve
from nanovllm.kernels.triton.state.gated_norm import gated_norm_kernel, normalize

# The tile of a sum depends on the layer alone, but how threads share it depends on what is known
# of strides. That of a gate's only row is another one than that of many, and may be less aligned.
_ordered_norm_kernel = triton.jit(
    gated_norm_kernel.fn, do_not_specialize=["num_groups", "gate_row"]
)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    silu: bool,
) -> torch.Tensor:
    """Filter x [T, C] by weight [C, W]: the sum of the bias and the products, the oldest first."""
    return convolve(UNFUSED, x, weight, bias, states, step, silu)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """Normalize the groups of x [T, G, D], by one compiled program for any number of rows."""
    return normalize(_ordered_norm_kernel, x, gate, weight, eps, gate_first)
