"""The state spaces of Mamba 2.

A head's state S [P, N] changes with each token: S <- exp(-rate * dt) * S + (dt * x) B. The output
is S C + skip * x.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.operands.state_step import StateStep


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    rates: SpaceRates,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The outputs [T, H, P] of xbc [T, H * P + 2 * G * N], with dt [T, H].

    `states` [slots, H, P, N] are in float32. H / G consecutive heads share a group's B and C.
    Tokens are computed one after another, so a state does not depend on how a sequence was divided
    into steps.
    """
    _, num_heads, head_dim, size = states.shape
    x, b, c = split_groups(xbc, num_heads, head_dim, size)
    shared = num_heads // b.shape[1]
    inputs, b, c = (each.float() for each in (x, b, c))
    b, c = (each.repeat_interleave(shared, dim=1) for each in (b, c))
    time = F.softplus(dt.float() + rates.bias).clamp(rates.low, rates.high)
    forget = (-rates.log_rate.exp() * time).exp()
    out = step.outputs(x, *x.shape)
    for rows, before, after in step.batches:
        state = states[before]
        for row, slot in zip(rows.unbind(1), after.unbind(1), strict=True):
            new = (inputs[row] * time[row, :, None])[..., None] * b[row, :, None, :]
            state = state * forget[row, :, None, None] + new
            read = torch.einsum("nhps,nhs->nhp", state, c[row])
            out[row] = (read + rates.skip[:, None] * inputs[row]).to(out.dtype)
            states[slot] = state
    return out


def split_groups(
    xbc: torch.Tensor, num_heads: int, head_dim: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of inputs [T, H, P] and the groups of B and C [T, G, N]: views of `xbc`."""
    num_inputs = num_heads * head_dim
    in_groups = (xbc.shape[1] - num_inputs) // 2
    x, b, c = torch.split(xbc, [num_inputs, in_groups, in_groups], dim=1)
    tokens = len(xbc)
    b, c = b.view(tokens, -1, size), c.view(tokens, -1, size)
    return x.view(tokens, num_heads, head_dim), b, c
