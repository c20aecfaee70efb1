"""Experts as DeepSeek-V3 has them: chosen by sigmoids, with an expert that all tokens use."""

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    expert_groups,
    experts_per_token,
)
from nanovllm.models.fields import Fields

# Another name of a field, which transformers reads, too.
SPELLING = {"num_local_experts": "n_routed_experts"}


def sigmoid_experts(fields: Fields, layers: frozenset[int]) -> ExpertsConfig:
    """The experts of these layers. The shared one is `n_shared_experts` times as large."""
    num_experts, inner = fields.size("n_routed_experts"), fields.size("moe_intermediate_size")
    shared = SharedExpert(inner * fields.size("n_shared_experts"))
    return ExpertsConfig(num_experts, inner, sigmoid_routing(fields, num_experts), layers, shared)


def sigmoid_routing(fields: Fields, num_experts: int) -> Routing:
    """Sigmoids, with a bias for the choice, in the groups that the config may have."""
    return Routing(
        per_token=experts_per_token(fields, num_experts),
        normalized=fields.flag("norm_topk_prob"),
        scores="sigmoid",
        has_bias=True,
        groups=expert_groups(fields, num_experts),
        scale=fields.number("routed_scaling_factor"),
    )
