"""The gated delta rule of Kimi Linear, in which each channel of keys forgets by itself.

A head's memory S [Dk, Dv] changes with each token: S <- diag(g) S, then S <- S + k (beta * (v - k
S)). The output is q S. Keys and queries have length 1; queries are divided by the root of Dk.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.rates import ChannelRates
from nanovllm.kernels.operands.state_step import StateStep
from nanovllm.kernels.plain.gated_delta import split_heads, unit


def channel_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: ChannelRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, Dv] of qkv [T, 2 * H * Dk + H * Dv], with a [T, H * Dk] and b [T, H].

    `states` [slots, H, Dk, Dv] have the memories in float32. Tokens are computed one after another,
    so a memory does not depend on how a sequence was divided into steps.
    """
    _, num_heads, key_size, value_size = states.shape
    q, k, v = split_heads(qkv, num_heads, key_size, value_size)
    q, k = unit(q.float()) * key_size**-0.5, unit(k.float())
    forget = log_forget(a.float() + rates.bias, rates, num_heads).exp()
    learn = b.float().sigmoid()
    out = step.outputs(v, *v.shape)
    for rows, before, after in step.batches:
        memory = states[before]
        for row, slot in zip(rows.unbind(1), after.unbind(1), strict=True):
            memory = memory * forget[row, :, :, None]
            known = torch.einsum("nhk,nhkv->nhv", k[row], memory)
            change = (v[row].float() - known) * learn[row, :, None]
            memory = memory + k[row, :, :, None] * change[:, :, None, :]
            out[row] = torch.einsum("nhk,nhkv->nhv", q[row], memory).to(out.dtype)
            states[slot] = memory
    return out


def log_forget(x: torch.Tensor, rates: ChannelRates, num_heads: int) -> torch.Tensor:
    """The logarithms [T, H, Dk] of the factors by which channels shrink, of numbers [T, H * Dk]."""
    x, rate = x.view(len(x), num_heads, -1), rates.log_rate.exp()[:, None]
    if rates.lowest is None:
        return -rate * F.softplus(x)
    return rates.lowest * (rate * x).sigmoid()
