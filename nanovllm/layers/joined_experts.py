"""Experts in addition to a dense feed-forward part, with a router that has norms and scales."""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.route import choose
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.backend import Backend
from nanovllm.layers.gelu_experts import GeluExperts
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.scaled_block import ScaledBlock
from nanovllm.layers.sizes import ExpertSizes


class ScaledRouter(Layer):
    """Selects experts for rows that it normalizes itself.

    The shares of a row's experts add up to 1, and are then multiplied by the experts' own scales.
    Scores are computed in the model's type, shares in float32.
    """

    kernels: Kernels = PLAIN

    def __init__(self, make: Build, hidden_size: int, eps: float, sizes: ExpertSizes) -> None:
        super().__init__()
        self.per_token, self.eps, self.factor = sizes.per_token, eps, hidden_size**-0.5
        self.scale = nn.Parameter(torch.ones(hidden_size), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.ones(sizes.num_experts), requires_grad=False)
        self.proj = ReplicatedLinear(
            hidden_size, sizes.num_experts, False, make.inside("router").formats.of("proj")
        )

    def bind(self, backend: Backend) -> None:
        self.kernels = backend.kernels

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares [T, K] and the ids [T, K] of the experts of rows x [T, hidden]."""
        scores = self.proj(self.kernels.rms_norm(x, self.scale * self.factor, self.eps))
        shares, ids = choose(scores.float(), self.per_token, normalized=True)
        scales = self.per_expert_scale.index_select(0, ids.flatten()).view_as(ids)
        return shares * scales, ids


class JoinedBlock(ScaledBlock):
    """A block with experts in addition to its dense part: both read x, each after its own norm.

    The outputs of both are normalized, added up, and normalized again.
    """

    def __init__(
        self, make: Build, hidden_size: int, eps: float, *args: Any, sizes: ExpertSizes
    ) -> None:
        super().__init__(make, hidden_size, eps, *args)
        self.router = ScaledRouter(make, hidden_size, eps, sizes)
        num_experts = sizes.num_experts
        self.experts = GeluExperts(
            num_experts, hidden_size, sizes.intermediate_size, make.ranks, make.whole_experts,
            make.formats.of_experts(num_experts), make.formats.names.experts,
        )  # fmt: skip
        self.post_feedforward_layernorm_1 = RMSNorm(hidden_size, eps, make.ranks)
        self.post_feedforward_layernorm_2 = RMSNorm(hidden_size, eps, make.ranks)
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden_size, eps)

    def fed(self, normed: Any, x: torch.Tensor) -> torch.Tensor:
        dense = self.post_feedforward_layernorm_1.of_sum(self.parts.feed_forward(normed))
        shares, ids = self.router(x)
        chosen = self.experts(self.pre_feedforward_layernorm_2(x), ids, shares)
        both = dense + self.post_feedforward_layernorm_2.of_sum(chosen)
        after = self.parts.after_feed_forward
        assert after is not None
        added: torch.Tensor = after(both)
        return added
