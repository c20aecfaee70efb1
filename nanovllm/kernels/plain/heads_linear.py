"""Products of heads that have a matrix each. The sizes are T rows, H heads, K inputs, N outputs."""

import torch


def heads_linear(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight` for each head: [T, H, N] of x [T, H, K] and weights [H, K, N].

    The result is written to `out` if that is given; else heads may come first in memory.
    """
    if out is None:
        return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
