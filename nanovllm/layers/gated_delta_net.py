"""GatedDeltaNet: a mixer with a memory of values by keys for each head, which forgets and corrects.

A short convolution mixes the tokens' queries, keys and values; then the gated delta rule writes the
values, and reads them. `kernels/plain/gated_delta.py` defines it.
"""

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, check_shape, copy_into
from nanovllm.kernels.operands.rates import DeltaRates
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import state_step
from nanovllm.layers.delta_sizes import KINDS, DeltaNames, DeltaSizes
from nanovllm.layers.gated_norm import GatedNorm
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.mixer import ProjectedMixer, Ropes
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.row_order import RowOrdered, rows_of_kinds
from nanovllm.layers.short_conv import ShortConv
from nanovllm.layers.state_mixer import StateMixer


class InProjection(RowOrdered, MergedColumnParallelLinear):
    """All projections of a token's hidden state as one matrix: a rank has rows of each kind."""


class DeltaConv(ShortConv):
    """Files have the filters of queries, keys and values as one tensor, or as three.

    transformers saves three equal parts of the one tensor.
    """

    def __init__(self, sizes: tuple[int, ...], width: int, ranks: Ranks) -> None:
        super().__init__(sizes, width, ranks)
        self.sizes = sizes

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        if shard_id is None:
            super().weight_loader(param, loaded, None)
            return
        size, first = loaded.shape[0], sum(self.sizes[:shard_id])
        if size * len(self.sizes) == self.num_channels:
            first = shard_id * size
        else:
            check_shape(loaded, self.whole_shape(param, shard_id))
        row = 0
        for own in self.own:
            start, stop = max(own.start, first), min(own.stop, first + size)
            if start < stop:
                here = row + start - own.start
                piece = param.unsqueeze(1)[here : here + stop - start]
                piece.copy_(loaded[start - first : stop - first])
            row += own.stop - own.start

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        if shard_id is None:
            return super().whole_shape(param, None)
        return self.sizes[shard_id], 1, self.width


class GatedDeltaNet(ProjectedMixer, StateMixer, Layer):
    """The gated delta rule between projections; its heads' outputs are normalized, with a gate.

    The ranks divide the heads. The rates `A_log` and `dt_bias` are float32, as kernels read them.
    A head learns by at most `most`: with 2, a memory can change its sign.
    """

    kernels: Kernels = PLAIN
    initial = 0.0

    def __init__(
        self, make: Build, hidden_size: int, sizes: DeltaSizes, names: DeltaNames, eps: float,
        *, most: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks, self.most = make.ranks, most
        self.num_heads, self.own = sizes.heads, ranks.equal_slice(sizes.heads)
        here = sizes.part(ranks.size)
        self.sizes = [here.conv_size, here.values, here.heads, here.heads]  # qkv, z, b, a
        self.in_proj = _in_projection(make, hidden_size, sizes, names)
        self.conv1d = DeltaConv((sizes.keys, sizes.keys, sizes.values), sizes.width, ranks)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.zeros(here.heads, dtype=torch.float32), requires_grad=False)
            for _ in range(2)
        )
        norm = GatedNorm(sizes.value_dim, eps)
        out_proj = RowParallelLinear(
            sizes.values, hidden_size, ranks=ranks, weight_format=make.formats.of(names.out_proj)
        )
        self.add_module(names.norm, norm)
        self.add_module(names.out_proj, out_proj)
        self.last = norm, out_proj
        self.cache = here.state

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the rates of this rank's heads."""
        assert shard_id is None
        copy_into(param, loaded, (self.num_heads,), (self.own,))

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        return (self.num_heads,)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        return self.in_proj, self.last[1]

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:  # noqa: ARG002
        conv_states, memories = self.states
        qkv, gate, b, a = torch.split(projected, self.sizes, dim=1)
        mixed = self.conv1d(qkv, conv_states)
        rates = DeltaRates(self.A_log, self.dt_bias, self.most)
        out = self.kernels.gated_delta(mixed, a, b, rates, memories, state_step())
        normed: torch.Tensor = self.last[0](out.flatten(1), gate)
        return normed


def _in_projection(
    make: Build, hidden_size: int, sizes: DeltaSizes, names: DeltaNames
) -> InProjection:
    """The projections. On each rank, their rows are in the order of `KINDS`."""
    assert "".join(names.projections.values()) == KINDS
    tensors = [sizes.rows(kinds) for kinds in names.projections.values()]
    groups, num_ranks = sizes.key_heads if names.by_key_head else 1, make.ranks.size
    orders = {i: rows_of_kinds(rows, num_ranks, groups) for i, rows in enumerate(tensors)}
    return InProjection(
        hidden_size, [sum(rows) for rows in tensors], ranks=make.ranks,
        weight_format=make.formats.of("in_proj"), orders=orders,
    )  # fmt: skip
