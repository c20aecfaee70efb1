"""A short convolution over the tokens of each sequence, one filter for each channel."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.state_step import StateStep


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    silu: bool,
) -> torch.Tensor:
    """Filter x [T, C] by weight [C, W]; with `silu`, this is applied to the results.

    `states` [slots, W - 1, C] have the inputs of the last W - 1 tokens, the oldest first. A token's
    result is the bias and the products of its W inputs, added in this order in float32.
    """
    width = weight.shape[1]
    out = step.outputs(x, *x.shape)
    for rows, before, after in step.batches:
        inputs = torch.cat([states[before], x[rows].to(states.dtype)], dim=1)
        num_tokens = rows.shape[1]
        total = torch.zeros((), device=x.device) if bias is None else bias.float()
        for tap in range(width):
            total = total + inputs[:, tap : tap + num_tokens].float() * weight[:, tap].float()
        out[rows] = (F.silu(total) if silu else total).to(out.dtype)
        is_kept = after >= 0
        windows = inputs.unfold(1, width - 1, 1)[:, 1:]  # after each token
        states[after[is_kept]] = windows[is_kept].transpose(1, 2)
    return out
