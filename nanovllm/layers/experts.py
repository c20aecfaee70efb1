"""Experts: feed-forward layers side by side, of which each token takes a few."""

import torch
from torch import nn

from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.linear import WHOLE, Loaded, copy_into
from nanovllm.utils.ranks import ALONE, Ranks


class Experts(nn.Module):
    """The gated feed-forward layers of all E experts: [T, hidden] -> [T, hidden].

    The ranks share out every expert's inside, I wide, and add up the outputs. A checkpoint has
    three matrices for each expert. Of those that make a parameter, `shard_id` counts through all
    experts'; it is None for a tensor that has them all.
    """

    kernels: Kernels = PLAIN  # the runner binds others

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_experts = num_experts
        self.all_inside = intermediate_size
        self.inside = ranks.share(intermediate_size)
        size = self.inside.stop - self.inside.start
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * size, hidden_size), requires_grad=False
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, size), requires_grad=False
        )

    def parts(self, name: str) -> list[str]:
        """What checkpoints have for the parameter `name`, by `shard_id`."""
        kinds = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        return [f"{i}.{kind}.weight" for i in range(self.num_experts) for kind in kinds]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill an expert's part of `param`, or all of it from one tensor [E, out, in]."""
        if param is self.down_proj:
            self._load_down(param, loaded, shard_id)
        elif shard_id is not None:
            half = param[shard_id // 2].chunk(2)[shard_id % 2]
            copy_into(half, loaded, (self.all_inside, half.shape[1]), (self.inside,))
        else:
            shape = (len(param), 2 * self.all_inside, param.shape[2])
            for half, above in zip(param.chunk(2, dim=1), (0, self.all_inside), strict=True):
                rows = slice(above + self.inside.start, above + self.inside.stop)
                copy_into(half, loaded, shape, (WHOLE, rows))

    def _load_down(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        target = param if shard_id is None else param[shard_id]
        shape = (*target.shape[:-1], self.all_inside)
        copy_into(target, loaded, shape, (*(WHOLE,) * (target.dim() - 1), self.inside))

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Of each row of x, the sum of its experts' outputs [T, K] by their shares [T, K]."""
        out = self.kernels.experts(x, self.gate_up_proj, self.down_proj, expert_ids, shares)
        return self.ranks.all_reduce(out)
