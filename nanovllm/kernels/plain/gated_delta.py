"""The gated delta rule: a memory of values by keys that forgets, and corrects what it remembers.

A head's memory S [Dk, Dv] changes with each token: S <- g * S, then S <- S + k (beta * (v - k S)).
The output is q S. Keys and queries have length 1; queries are divided by the root of Dk.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.rates import DeltaRates
from nanovllm.kernels.operands.state_step import StateStep

EPS = 1e-6  # added to a squared length


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: DeltaRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, Dv] of qkv [T, 2 * KH * Dk + H * Dv], with a, b [T, H].

    `states` [slots, H, Dk, Dv] have the memories in float32. H / KH consecutive heads of values
    share a head of keys and of queries. Tokens are computed one after another, so a memory does not
    depend on how a sequence was divided into steps.
    """
    _, num_heads, key_size, value_size = states.shape
    q, k, v = split_heads(qkv, num_heads, key_size, value_size)
    shared = num_heads // k.shape[1]
    q, k = (unit(x.float()).repeat_interleave(shared, dim=1) for x in (q, k))
    q = q * key_size**-0.5
    forget = (-rates.log_rate.exp() * F.softplus(a.float() + rates.bias)).exp()
    learn = b.float().sigmoid() * rates.most
    out = step.outputs(v, *v.shape)
    for rows, before, after in step.batches:
        memory = states[before]
        for row, slot in zip(rows.unbind(1), after.unbind(1), strict=True):
            memory = memory * forget[row, :, None, None]
            known = torch.einsum("nhk,nhkv->nhv", k[row], memory)
            change = (v[row].float() - known) * learn[row, :, None]
            memory = memory + k[row, :, :, None] * change[:, :, None, :]
            out[row] = torch.einsum("nhk,nhkv->nhv", q[row], memory).to(out.dtype)
            states[slot] = memory
    return out


def split_heads(
    qkv: torch.Tensor, num_heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of queries and keys [T, KH, Dk] and of values [T, H, Dv]: views of `qkv`."""
    num_values = num_heads * value_size
    num_keys = (qkv.shape[1] - num_values) // 2
    q, k, v = torch.split(qkv, [num_keys, num_keys, num_values], dim=1)
    tokens = len(qkv)
    q, k = q.view(tokens, -1, key_size), k.view(tokens, -1, key_size)
    return q, k, v.view(tokens, num_heads, value_size)


def unit(x: torch.Tensor) -> torch.Tensor:
    """The vectors x [..., D] with length 1."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
