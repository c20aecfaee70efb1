"""GatedNorm: RMS norms of heads or of groups of channels, with a gate."""

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, copy_into
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import ALONE, Ranks


class GatedNorm(Layer):
    """RMS norms of groups of `size` channels, multiplied by silu of a gate after or `gate_first`.

    Without `num_groups`, all groups share their weights. Else each of them has its own, which the
    ranks divide.
    """

    kernels: Kernels = PLAIN

    def __init__(
        self, size: int, eps: float, *, num_groups: int | None = None, gate_first: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.eps, self.gate_first = size, eps, gate_first
        self.whole, self.own = (size,), slice(0, size)
        if num_groups is not None:
            groups = ranks.equal_slice(num_groups)
            self.whole = (num_groups * size,)
            self.own = slice(groups.start * size, groups.stop * size)
        here = self.own.stop - self.own.start
        self.weight = nn.Parameter(torch.ones(here), requires_grad=False)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the weights of this rank's groups."""
        assert shard_id is None
        copy_into(param, loaded, self.whole, (self.own,))

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        return self.whole

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize the channels x [T, G * size], with a gate for each."""
        groups = len(x), -1, self.size
        weight = self.weight if len(self.weight) == self.size else self.weight.view(-1, self.size)
        normed = self.kernels.gated_norm(
            x.view(groups), gate.view(groups), weight, self.eps, self.gate_first
        )
        return normed.view(x.shape)
