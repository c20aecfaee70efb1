"""StateSpaceMixer: a state space with its projections, as in Mamba 2."""

from typing import Any

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, RankPart, copy_into
from nanovllm.kernels.operands.rates import SpaceRates
from nanovllm.kernels.table import PLAIN, Kernels, Rounding
from nanovllm.layers.activations import PlainActivation
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import state_step
from nanovllm.layers.gated_norm import GatedNorm
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import LinearBase, RowParallelLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.short_conv import ShortConv
from nanovllm.layers.state_mixer import StateMixer
from nanovllm.layers.state_space import StateSpace

OF_HEADS = ("A_log", "dt_bias", "D")  # parameters with a number for each head


class InProjection(LinearBase):
    """The gates, the channels, B, C and the time steps of a state space, as one matrix.

    The ranks divide heads and groups. With fewer groups than ranks, several ranks have the same
    group. Checkpoints have the matrix as one tensor.
    """

    def __init__(self, make: Build, hidden_size: int, space: StateSpace) -> None:
        channels, groups = _channels(space, make.ranks), _groups(space, make.ranks)
        rows = (channels, channels, groups, groups, make.ranks.equal_slice(space.num_heads))
        columns = slice(0, hidden_size)
        part = RankPart(space.projected, rows, hidden_size, columns, is_fused=True)
        super().__init__(part, space.in_bias, make.formats.of("in_proj"))


class StateSpaceMixer(StateMixer, Layer):
    """Project, filter, pass through the state space, gate and normalize, project.

    The parameters of heads are float32, as kernels read them: an update of weights in place is then
    seen at once.
    """

    kernels: Kernels = PLAIN
    initial = 0.0

    def __init__(self, make: Build, hidden_size: int, space: StateSpace, eps: float) -> None:
        super().__init__()
        self.space, ranks = space, make.ranks
        self.own = ranks.equal_slice(space.num_heads)
        channels, groups = _channels(space, ranks), _groups(space, ranks)
        self.in_proj = InProjection(make, hidden_size, space)
        self.conv1d = ShortConv(
            space.filtered, space.width, ranks, bias=space.conv_bias,
            parts=(channels, groups, groups),
        )  # fmt: skip
        for name in OF_HEADS:
            values = torch.zeros(self.own.stop - self.own.start, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        if space.norm is not None:
            self.norm = _norm(space, eps, ranks)
        else:
            self.opened = PlainActivation("silu")
        self.out_proj = RowParallelLinear(
            space.inner, hidden_size, space.out_bias, ranks, make.formats.of("out_proj")
        )
        here = space.part(ranks.size)
        self.cache, self.widths = here.state, [here.inner, sum(here.filtered), here.num_heads]

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill the numbers of this rank's heads."""
        assert shard_id is None
        copy_into(param, loaded, (self.space.num_heads,), (self.own,))

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:  # noqa: ARG002
        return (self.space.num_heads,)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def rounding(self, x: torch.Tensor) -> Rounding | None:
        return self.in_proj.rounding(x)

    @property
    def rates(self) -> SpaceRates:
        """The numbers of this rank's heads."""
        log_rate, bias, skip = (self.get_parameter(name) for name in OF_HEADS)
        return SpaceRates(log_rate, bias, skip, self.space.low, self.space.high)

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:  # noqa: ARG002
        gate, xbc, dt = torch.split(self.project_in(x), self.widths, dim=1)
        of_conv, of_heads = self.states
        xbc = self.conv1d(xbc, of_conv)
        out = self.kernels.state_space(xbc, dt, self.rates, of_heads, state_step()).flatten(1)
        if self.space.norm is None:
            opened: torch.Tensor = self.opened(gate)
            return out * opened
        normed: torch.Tensor = self.norm(out, gate)
        return normed

    def project_in(self, x: Any) -> torch.Tensor:
        """The gates, what is filtered, and the time steps [T, N] of hidden states."""
        projected: torch.Tensor = self.in_proj(x)
        return projected

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(mixed)
        return out


def _channels(space: StateSpace, ranks: Ranks) -> slice:
    """The channels of this rank's heads."""
    heads = ranks.equal_slice(space.num_heads)
    return slice(heads.start * space.head_dim, heads.stop * space.head_dim)


def _groups(space: StateSpace, ranks: Ranks) -> slice:
    """The numbers of this rank's groups in B, and in C."""
    first, number = ranks.rank * space.num_groups // ranks.size, space.part(ranks.size).num_groups
    return slice(first * space.state_size, (first + number) * space.state_size)


def _norm(space: StateSpace, eps: float, ranks: Ranks) -> GatedNorm:
    """The norm of each group; one whose groups are on several ranks if there are fewer groups."""
    size, gate_first = space.inner // space.num_groups, space.norm == "gate first"
    options: dict[str, Any] = dict(num_groups=space.num_groups, gate_first=gate_first, ranks=ranks)
    if space.num_groups >= ranks.size:
        return GatedNorm(size, eps, **options)
    from nanovllm.layers.shared_group_norm import SharedGroupNorm

    return SharedGroupNorm(size, eps, **options)
