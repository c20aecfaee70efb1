"""Experts without gates, and the part of a block that has them, as in Nemotron 3."""

from typing import NamedTuple

import torch

from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.activations import relu_squared
from nanovllm.layers.experts import Experts
from nanovllm.layers.feed_forward import FeedForward
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.plain_mlp import PlainMLP
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.sparse_mlp import ExpertRouter


class PlainExperts(Experts):
    """Experts of two matrices, with the square of relu between them. `Names.experts` says so."""

    num_inner = 1
    activation = staticmethod(relu_squared)


class ExpertSizes(NamedTuple):
    """The sizes of experts, of the part that all tokens use, and of experts' rows if reduced."""

    num_experts: int
    intermediate: int
    shared: int
    latent: int | None = None


class LastLatent(ReplicatedLinear):
    """The projection of the sum of experts, of which each rank has a part; rank 0 adds the bias."""

    def __init__(self, make: Build, name: str, size_in: int, size_out: int, *, bias: bool) -> None:
        super().__init__(size_in, size_out, bias, make.formats.of(name))
        self.ranks: Ranks = make.ranks

    @property
    def added_bias(self) -> torch.Tensor | None:
        return self.bias if self.ranks.rank == 0 else None


class PlainSparseMLP(FeedForward):
    """Experts that a router selects, and a part that all tokens use; none has a gate.

    With a latent size, the rows of experts are projected to this size before, and back after.
    """

    def __init__(
        self, make: Build, hidden_size: int, sizes: ExpertSizes, routing: Routing, *, bias: bool
    ) -> None:
        super().__init__()
        formats, num_experts = make.formats, sizes.num_experts
        self.gate = ExpertRouter(hidden_size, num_experts, routing, formats.in_float32("gate"))
        self.experts = PlainExperts(
            num_experts, sizes.latent or hidden_size, sizes.intermediate, make.ranks,
            make.whole_experts, formats.of_experts(num_experts), formats.names.experts,
        )  # fmt: skip
        self.shared_experts = PlainMLP(
            make.inside("shared_experts"), hidden_size, sizes.shared, relu_squared, bias=bias
        )
        self.is_latent = sizes.latent is not None
        if sizes.latent is not None:
            first, last = "fc1_latent_proj", "fc2_latent_proj"
            self.fc1_latent_proj = ReplicatedLinear(
                hidden_size, sizes.latent, bias, formats.of(first)
            )
            self.fc2_latent_proj = LastLatent(make, last, sizes.latent, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, expert_ids = self.gate.select(x)
        rows = self.fc1_latent_proj(x) if self.is_latent else x
        out: torch.Tensor = self.experts(rows, expert_ids, shares)
        if self.is_latent:
            out = self.fc2_latent_proj(out)
        shared: torch.Tensor = self.shared_experts(x)
        return out + shared
