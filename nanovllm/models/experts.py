"""SparseConfig: a model that has experts in all layers, or in some. No PyTorch here."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.models.config import ModelConfig
from nanovllm.models.shapes import (
    ExpertCount,
    LayerShape,
    MatrixShape,
    attention_matrices,
    gated_matrices,
)

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of the decoder layers `layers`; each token uses `per_token` of `num_experts`."""

    num_experts: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # whether the shares of a token's experts add up to 1
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class SparseConfig(ModelConfig):
    """The shape of a decoder with experts instead of the gated part in some layers."""

    experts: ExpertsConfig

    def layer_shape(self, index: int) -> LayerShape:
        dense, hidden, experts = super().layer_shape(index), self.hidden_size, self.experts
        if index not in experts.layers:
            return dense
        inner, router = experts.intermediate_size, ("mlp.gate", experts.num_experts, hidden)
        return replace(
            dense,
            matrices=(
                *attention_matrices(hidden, self.heads(index)), MatrixShape(*router),
                *gated_matrices(hidden, inner, "mlp.experts.0", is_experts=True),
            ),
            split={}, split_experts={"moe_intermediate_size": inner},
            experts=ExpertCount(experts.num_experts, experts.per_token),
        )  # fmt: skip

    @property
    def sizes(self) -> str:
        num_experts, inner = self.experts.num_experts, self.experts.intermediate_size
        return f"{super().sizes}, num_experts={num_experts}, moe_intermediate_size={inner}"


def sparse_mlp(config: SparseConfig, make: "Build") -> "FeedForward":
    """The experts of a layer."""
    from nanovllm.layers.sparse_mlp import SparseMLP

    experts = config.experts
    return SparseMLP(
        make, config.hidden_size, experts.intermediate_size, experts.num_experts,
        experts.per_token, normalized=experts.norm_topk_prob,
    )  # fmt: skip
