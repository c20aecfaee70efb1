"""The sigmoid of gates and scores."""

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), computed in float32.

    On a CPU, PyTorch's own function computes the last numbers of each thread's part by other
    instructions, so that a row's bits depend on the number of rows. Its exponential does not.
    """
    if x.device.type != "cpu":
        return x.sigmoid()
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)
