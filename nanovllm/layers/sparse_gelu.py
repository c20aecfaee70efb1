"""The activation of feed-forward parts that keep only the largest gates of each row."""

from statistics import NormalDist

import torch
import torch.nn.functional as F

from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE, Ranks


class SparseGeluAndMul(Layer):
    """`gelu(max(gate - cut, 0)) * up`: a share `sparsity` of the gates becomes 0.

    The cut is the quantile of a normal distribution with the mean and the deviation of a row's
    gates, on all ranks together: there are `size` of them. It rounds nothing.
    """

    kernels: Kernels = PLAIN

    def __init__(self, sparsity: float, size: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks, self.size = ranks, size
        self.deviations = NormalDist().inv_cdf(sparsity)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor:  # noqa: ARG002
        gate, up = x.chunk(2, dim=-1)
        wide = gate.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square()).sqrt()
        kept = (wide - (mean + deviation * self.deviations)).relu().to(x.dtype)
        if self.kernels.avoids_pytorch:
            return self.kernels.gelu_and_mul(torch.cat([kept, up], 1))
        return F.gelu(kept, approximate="tanh").mul_(up)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each row of all ranks' x: [T, 1]."""
        return self.ranks.all_reduce(self.kernels.row_sums(x)) / self.size
