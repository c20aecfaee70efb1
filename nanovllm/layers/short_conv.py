"""ShortConv: a causal convolution of a few tokens, with a filter for each channel."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.formats.stored import Loaded, check_shape
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.cache_spec import StateTensor
from nanovllm.layers.context import state_step
from nanovllm.layers.layer import Layer
from nanovllm.layers.ranks import Ranks


class ShortConv(Layer):
    """A filter of `width` tokens for each channel, and silu of its results unless `silu` is off.

    The channels have several parts, with `sizes`. The ranks divide each part, but have a part in
    `whole` each; or `parts` says what this rank has of each. Checkpoints have all filters as one
    tensor [C, 1, width].
    """

    kernels: Kernels = PLAIN
    initial = 0.0

    def __init__(
        self, sizes: tuple[int, ...], width: int, ranks: Ranks, *, bias: bool = False,
        silu: bool = True, whole: frozenset[int] = frozenset(),
        parts: Sequence[slice] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.silu, self.num_channels = width, silu, sum(sizes)
        self.own: list[slice] = []  # this rank's channels, in the checkpoint's tensor
        start = 0
        for number, size in enumerate(sizes):
            if parts is not None:
                part = parts[number]
            else:
                part = slice(0, size) if number in whole else ranks.equal_slice(size)
            self.own.append(slice(start + part.start, start + part.stop))
            start += size
        here = sum(part.stop - part.start for part in self.own)
        self.weight = nn.Parameter(torch.empty(here, width), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(here), requires_grad=False) if bias else None

    @property
    def state(self) -> StateTensor:
        """The inputs of the last tokens."""
        return conv_state(len(self.weight), self.width)

    def weight_loader(self, param: nn.Parameter, loaded: Loaded, shard_id: int | None) -> None:
        """Fill this rank's filters, or their biases."""
        check_shape(loaded, self.whole_shape(param, shard_id))
        target = param if param.dim() == 1 else param.unsqueeze(1)
        lengths = [part.stop - part.start for part in self.own]
        for piece, part in zip(torch.split(target, lengths), self.own, strict=True):
            piece.copy_(loaded[part])

    def whole_shape(self, param: nn.Parameter, shard_id: int | None) -> tuple[int, ...]:
        assert shard_id is None
        one_number = param.dim() == 1
        return (self.num_channels,) if one_number else (self.num_channels, 1, self.width)

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Filter the channels x [T, C] of the step's tokens; `states` have the inputs before."""
        return self.kernels.causal_conv(x, self.weight, self.bias, states, state_step(), self.silu)


def conv_state(num_channels: int, width: int) -> StateTensor:
    """What a convolution keeps: its last inputs, the oldest first."""
    return StateTensor((width - 1, num_channels))
