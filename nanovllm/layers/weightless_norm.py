"""WeightlessNorm: RMSNorm without weights."""

import torch

from nanovllm.layers.rms_norm import RMSNorm


class WeightlessNorm(RMSNorm):
    """RMSNorm without factors. The kernels read ones, which no checkpoint has."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)
