"""Linear layers, named by how tensor parallelism would split them.

Every layer knows how a checkpoint's tensors go into its parameters: `weight_loader(param, loaded,
shard_id)` fills one part of one.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.packed_linear import can_pack, pack, packed_linear


def copy_into(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy a checkpoint's tensor into its place, which must have its very shape."""
    if target.shape != loaded.shape:
        raise ValueError(f"shape {tuple(loaded.shape)}, the model needs {tuple(target.shape)}")
    target.copy_(loaded)


class LinearBase(nn.Module):
    """`x @ weight.T + bias`. `pack()` moves the weight into the CPU's own layout, once loaded."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int | None
    ) -> None:
        """Fill the whole of `param`."""
        assert shard_id is None
        copy_into(param, loaded)

    def pack(self) -> None:
        """Trade the weight for a copy in oneDNN's blocked layout, where that is faster.

        Peak memory: this weight twice, for as long as it is copied.
        """
        if self.weight is not None and can_pack(self.weight):
            self.packed = pack(self.weight)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank holds whole."""


class ColumnParallelLinear(LinearBase):
    """A linear layer whose outputs the ranks would share out."""


class RowParallelLinear(LinearBase):
    """A linear layer whose inputs the ranks would share out."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input as one matrix; `shard_id` is a projection's index."""

    def __init__(self, in_features: int, out_features: list[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features), bias)
        self.out_features = out_features

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int | None
    ) -> None:
        """Fill the rows of projection `shard_id`."""
        assert shard_id is not None
        start = sum(self.out_features[:shard_id])
        copy_into(param[start : start + self.out_features[shard_id]], loaded)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one matrix: [T, hidden] -> [T, (H + 2 * KVH) * D]."""

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool
    ) -> None:
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        super().__init__(hidden_size, sizes, bias)
