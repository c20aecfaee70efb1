"""LFM2 with experts in all but the first layers: 8B-A1B."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import ExpertsConfig, SparseConfig, experts_per_token, sparse_mlp
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.lfm2 import NAMES, SIZES, SPELLING, Lfm2Config, kinds_of, mixed_fields
from nanovllm.models.lfm2 import build as build_lfm2
from nanovllm.models.spellings import errors_spell
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
LEAST_SUM = 1e-6  # added to the sum of a token's scores


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config, SparseConfig):
    """With experts."""


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> Lfm2MoeConfig:
    """A bias for each expert is added to its score, a sigmoid, only for the choice.

    Without `layer_types` and `full_attn_idxs`, all layers have attention.
    """
    fields = Fields(file, DEFAULTS)
    decoder = mixed_fields(file, DEFAULTS, kinds_of(fields))
    num_layers, num_experts = decoder["num_hidden_layers"], fields.size("num_experts")
    num_dense = check_int("num_dense_layers", fields["num_dense_layers"], 0)
    routing = Routing(
        per_token=experts_per_token(fields, num_experts),
        normalized=fields.flag("norm_topk_prob"),
        scores="sigmoid",
        has_bias=fields.flag("use_expert_bias"),
        scale=fields.number("routed_scaling_factor"),
        tiny=LEAST_SUM,
    )
    layers, inner = frozenset(range(num_dense, num_layers)), fields.size("moe_intermediate_size")
    return Lfm2MoeConfig(**decoder, experts=ExpertsConfig(num_experts, inner, routing, layers))


def build(config: Lfm2MoeConfig, make: "Build") -> "CausalLM":
    """LFM2 with experts."""
    from nanovllm.models import parts

    def feed_forward(index: int, make: "Build") -> "FeedForward":
        is_sparse = index in config.experts.layers
        return sparse_mlp(config, make) if is_sparse else parts.mlp(config, make)

    return build_lfm2(config, make, feed_forward)


FAMILY = Family(read, build, NAMES)
