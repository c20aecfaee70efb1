"""Linear layers, named by how the ranks of a tensor-parallel model split them.

Every layer loads its own parameters: `weight_loader(param, loaded, shard_id)` fills a part of one,
and reads only what this rank holds.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.cpu.packed_linear import can_pack, pack, packed_linear
from nanovllm.layers.backend import Backend
from nanovllm.layers.layer import WHOLE, Layer, Loaded, copy_into, copy_whole
from nanovllm.layers.ranks import ALONE, Ranks


class LinearBase(Layer):
    """`x @ weight.T + bias`. `pack` replaces the weight with a copy in a layout for the CPU.

    `in_features` and `out_features` are the sizes that this rank holds.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def bind(self, backend: Backend) -> None:  # noqa: ARG002
        """Pack the weight: the fastest layout depends only on the device."""
        self.pack()

    def pack(self) -> None:
        """Replace the weight with a copy in oneDNN's blocked layout, where that is faster.

        Peak memory: this weight is held twice while it is copied.
        """
        if self.weight is not None and can_pack(self.weight):
            self.packed = pack(self.weight)
            self.weight = None

    @property
    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight, which must not be packed, and the bias."""
        assert self.weight is not None
        return self.weight, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.bias)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the weight, packed or not, and add `bias`."""
        if self.packed is not None:
            return packed_linear(x, self.packed, bias)
        assert self.weight is not None
        return F.linear(x, self.weight, bias)


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank holds whole."""


class RowParallelLinear(LinearBase):
    """A linear layer whose inputs are split among the ranks, which add up their outputs.

    [T, in / size] -> [T, out]. Only rank 0 adds the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(in_features // ranks.size, out_features, bias)
        self.ranks = ranks
        self.columns = ranks.equal_slice(in_features)
        self.all_columns = in_features

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill a weight with this rank's columns, or the bias."""
        assert shard_id is None
        if param.dim() == 1:
            copy_whole(param, loaded)
        else:
            copy_into(param, loaded, (param.shape[0], self.all_columns), (WHOLE, self.columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(self.linear(x, self.bias if self.ranks.rank == 0 else None))


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input as one matrix; `shard_id` is a projection's index, or None.

    Each projection is split by itself, so that a rank has a part of every one.
    """

    def __init__(
        self, in_features: int, out_features: list[int], bias: bool = False, ranks: Ranks = ALONE
    ) -> None:
        parts = [ranks.equal_slice(n) for n in out_features]
        self._init_parts(in_features, out_features, parts, bias)

    def _init_parts(
        self, in_features: int, out_features: list[int], parts: list[slice], bias: bool
    ) -> None:
        super().__init__(in_features, sum(part.stop - part.start for part in parts), bias)
        self.out_features = out_features
        self.held = parts  # the rows of each projection that this rank holds

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the rows of projection `shard_id`, or of all if the checkpoint has them fused."""
        ids = range(len(self.held)) if shard_id is None else [shard_id]
        num_rows = sum(self.out_features[i] for i in ids)
        shape, offset = (num_rows, *param.shape[1:]), 0
        targets = torch.split(param, [part.stop - part.start for part in self.held])
        for i in ids:
            part = slice(offset + self.held[i].start, offset + self.held[i].stop)
            copy_into(targets[i], loaded, shape, (part,))
            offset += self.out_features[i]


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one matrix: [T, hidden] -> [T, (H + 2 * KVH) * D].

    H and KVH are this rank's. With fewer key heads than ranks, neighbours hold the same one.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        heads = ranks.equal_slice(num_heads)
        first = ranks.rank * num_kv_heads // ranks.size
        kv_heads = slice(first, first + max(1, num_kv_heads // ranks.size))
        parts = [
            slice(part.start * head_dim, part.stop * head_dim)
            for part in (heads, kv_heads, kv_heads)
        ]
        sizes = [n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)]
        self._init_parts(hidden_size, sizes, parts, bias)
        self.num_heads = heads.stop - heads.start
        self.num_kv_heads = kv_heads.stop - kv_heads.start
