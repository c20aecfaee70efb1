"""GatedConv: a mixer with a convolution of a few tokens between two gates, as in LFM2."""

import torch

from nanovllm.layers.cache_spec import State
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.mixer import ProjectedMixer, Ropes
from nanovllm.layers.short_conv import ShortConv
from nanovllm.layers.state_mixer import StateMixer


class GatedConv(ProjectedMixer, StateMixer):
    """`out_proj(c * conv(b * x))`, where `in_proj` makes b, c and x of a token, in this order.

    `conv` filters the last `width` tokens of each channel. The ranks divide the channels. With
    `bias`, both projections and the filters have biases.
    """

    def __init__(self, make: Build, hidden_size: int, width: int, bias: bool = False) -> None:
        super().__init__()
        ranks, formats = make.ranks, make.formats
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, [hidden_size] * 3, bias, ranks, formats.of("in_proj")
        )
        self.conv = ShortConv((hidden_size,), width, ranks, bias=bias, silu=False)
        self.out_proj = RowParallelLinear(
            hidden_size, hidden_size, bias, ranks, formats.of("out_proj")
        )
        self.cache = State((self.conv.state,))

    def linears(self) -> tuple[LinearBase, RowParallelLinear]:
        return self.in_proj, self.out_proj

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:  # noqa: ARG002
        before, after, channels = projected.chunk(3, dim=-1)
        filtered: torch.Tensor = self.conv(before * channels, self.states[0])
        mixed: torch.Tensor = after * filtered
        return mixed
