"""ChannelDeltaNet: the mixer of Kimi Linear, a gated delta net whose channels forget by themselves.

`kernels/plain/channel_delta.py` defines the recurrence.
"""

import torch
from torch import nn

from nanovllm.formats.format import WeightFormat
from nanovllm.formats.stored import Loaded, RankPart, copy_into
from nanovllm.kernels.operands.rates import ChannelRates
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.channel_delta_sizes import ChannelDeltaSizes
from nanovllm.layers.context import state_step
from nanovllm.layers.gated_delta_net import DeltaConv
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.mixer import ProjectedMixer, Ropes
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.state_mixer import StateMixer


class InProjection(LinearBase):
    """The projections of a token's hidden state as one matrix.

    The ranks divide each, except those of `dim` numbers, which every rank has whole.
    """

    def __init__(
        self, hidden_size: int, sizes: ChannelDeltaSizes, ranks: Ranks, weight_format: WeightFormat
    ) -> None:
        names = sizes.projections
        rows = (
            slice(0, size) if name in ("f_a_proj", "g_a_proj") else ranks.equal_slice(size)
            for name, size in names.items()
        )  # fmt: skip
        part = RankPart((*names.values(),), (*rows,), hidden_size, slice(0, hidden_size))
        super().__init__(part, False, weight_format)
        self.outputs = [part.stop - part.start for part in self.rank_part.rows]


class ChannelDeltaNet(ProjectedMixer, StateMixer, Layer):
    """The recurrence between projections; heads' outputs are normalized, then gated by sigmoids.

    The ranks divide the heads. The rates `A_log` and `dt_bias` are float32, as kernels read them.
    """

    kernels: Kernels = PLAIN
    initial = 0.0

    def __init__(self, make: Build, hidden_size: int, sizes: ChannelDeltaSizes, eps: float) -> None:
        super().__init__()
        ranks, of, size = make.ranks, make.formats.of, sizes.size
        self.whole, self.heads = sizes, ranks.equal_slice(sizes.heads)
        here = sizes.part(ranks.size)
        self.in_proj = InProjection(hidden_size, sizes, ranks, of("in_proj"))
        self.conv1d = DeltaConv((size, size, size), sizes.width, ranks)
        self.expansions: tuple[LinearBase, ...] = ()
        if sizes.low_rank:
            self.f_b_proj, self.g_b_proj = self.expansions = tuple(
                MergedColumnParallelLinear(sizes.dim, [size], False, ranks, of(name))
                for name in ("f_b_proj", "g_b_proj")
            )
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.zeros(number, dtype=torch.float32), requires_grad=False)
            for number in (here.heads, here.size)
        )
        self.o_norm = RMSNorm(sizes.dim, eps)
        self.o_proj = RowParallelLinear(size, hidden_size, False, ranks, of("o_proj"))
        self.cache = here.state

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the rates of this rank's heads."""
        shape, size = self.whole_shape(param, shard_id), len(param)
        each = size // (self.heads.stop - self.heads.start)
        own = slice(self.heads.start * each, self.heads.stop * each)
        index = tuple(slice(0, 1) if number == 1 else own for number in shape)
        here = tuple(1 if number == 1 else size for number in shape)
        copy_into(param.view(here), loaded, shape, index)

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert shard_id is None
        is_of_heads = len(param) == self.heads.stop - self.heads.start
        return self.whole.rates_shape if is_of_heads else (self.whole.size,)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        return self.in_proj, self.o_proj

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:  # noqa: ARG002
        conv_states, memories = self.states
        q, k, v, *gates, b = self.in_proj.outputs
        qkv, forget, gate, learn = torch.split(projected, [q + k + v, *gates, b], dim=1)
        if self.expansions:
            forget, gate = (
                expand(x.contiguous())
                for expand, x in zip(self.expansions, (forget, gate), strict=True)
            )
        mixed = self.conv1d(qkv, conv_states)
        rates = ChannelRates(self.A_log, self.dt_bias, self.whole.lowest)
        out = self.kernels.channel_delta(mixed, forget, learn, rates, memories, state_step())
        normed: torch.Tensor = self.o_norm(out.flatten(0, 1))
        return self.kernels.sigmoid_and_mul(normed.view(len(out), -1), gate)
