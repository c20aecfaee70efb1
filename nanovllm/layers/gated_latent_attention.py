"""Latent attention whose heads are multiplied by the sigmoid of a gate, as in Ling 3."""

from typing import Any

import torch

from nanovllm.kernels.plain.sigmoid import sigmoid
from nanovllm.layers.latent_attention import LatentAttention, Multiply
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear
from nanovllm.layers.mixer import Ropes


class GatedLatentAttention(LatentAttention):
    """`g_proj` makes a gate for each head of a token's hidden state."""

    def __init__(self, make: Build, hidden_size: int, sizes: LatentSizes) -> None:
        super().__init__(make, hidden_size, sizes)
        self.g_proj = MergedColumnParallelLinear(
            hidden_size, [sizes.num_heads], False, make.ranks, make.formats.of("g_proj")
        )

    def linears(self) -> tuple[LinearBase, ...]:
        return self.g_proj, *super().linears()

    def _mix(self, x: Any, ropes: Ropes, multiply: Multiply) -> torch.Tensor:
        gates = multiply(x, self.g_proj)
        attended = super()._mix(x, ropes, multiply)
        opened = sigmoid(gates.float()).to(attended.dtype)
        heads = attended.view(*opened.shape, -1)
        return (heads * opened.unsqueeze(-1)).view(attended.shape)
