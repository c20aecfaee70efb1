"""SharedGroupNorm: RMS norms of groups that several ranks have a part of."""

import torch
from torch import nn

from nanovllm.kernels.plain.sigmoid import sigmoid
from nanovllm.layers.gated_norm import GatedNorm
from nanovllm.layers.ranks import Ranks


class SharedGroupNorm(GatedNorm):
    """RMS norms with gates, of fewer groups than ranks: the ranks divide each group.

    The sums of squares are added up over the ranks, a column for each group.
    """

    def __init__(
        self, size: int, eps: float, *, num_groups: int, gate_first: bool, ranks: Ranks
    ) -> None:
        super().__init__(size, eps, gate_first=gate_first)
        self.ranks, self.num_groups = ranks, num_groups
        self.whole = (num_groups * size,)
        self.own = ranks.equal_slice(num_groups * size)
        self.group = ranks.rank * num_groups // ranks.size
        here = self.own.stop - self.own.start
        self.weight = nn.Parameter(torch.ones(here), requires_grad=False)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's channels of its group, with a gate for each."""
        wide = gate.float()
        opened = wide * sigmoid(wide)
        values = x.float() * opened if self.gate_first else x.float()
        squares = values.new_zeros(len(x), self.num_groups)
        squares[:, self.group] = self.kernels.row_sums(values.square())[:, 0]
        squares = self.ranks.all_reduce(squares)[:, self.group, None]
        values = values * torch.rsqrt(squares / self.size + self.eps)
        values = self.weight * values.to(x.dtype)
        return values if self.gate_first else (values * opened).to(x.dtype)
