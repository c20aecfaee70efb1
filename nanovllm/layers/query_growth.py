"""Queries that are multiplied by a factor of their position, as in Llama 4 and Ministral 3."""

import torch
from torch import nn

from nanovllm.layers.mixer import Ropes, SelfAttention
from nanovllm.layers.rotary_embedding import RotaryEmbedding

GROWTH = "growth"  # the name of the factors among a decoder's ropes


class QueryGrowth(RotaryEmbedding):
    """The factor 1 + growth * log(1 + p // length) for each position p, in float32: [P, 2, 1].

    A step looks it up once, with the ropes: the factors are in the place of cosines and of sines.
    """

    def __init__(self, growth: float, length: int, max_positions: int) -> None:
        nn.Module.__init__(self)
        steps = torch.arange(max_positions, dtype=torch.float32, device="cpu").div(length).floor_()
        factors = 1 + growth * torch.log1p(steps)
        table = factors.view(-1, 1, 1).repeat(1, 2, 1)
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)


class GrowingQueries(SelfAttention):
    """Self-attention that multiplies queries by the factors of a `QueryGrowth`."""

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        """`projected` is overwritten. A rotation by the same factor changes nothing of it."""
        factors, _ = ropes[GROWTH]
        projected[:, : self.qkv_proj.num_heads * self.head_dim].mul_(factors[:, 0])
        return super().attend(projected, ropes)
