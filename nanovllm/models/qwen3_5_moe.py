"""Qwen3.5 with experts, text only: 35B-A3B."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    all_layers,
    experts_per_token,
    number_of_experts,
    sparse_mlp,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.qwen2_moe import SHARED_SIZE
from nanovllm.models.qwen3_5 import NAMES, SIZES, GatedConfig, gated_fields
from nanovllm.models.qwen3_5 import build as build_gated

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

INNER = "moe_intermediate_size"
DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, INNER: 512, SHARED_SIZE: 512,
    "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GatedSparseConfig(GatedConfig, SparseConfig):
    """With experts in some layers, or in all."""


def read(file: Mapping[str, Any]) -> GatedSparseConfig:
    """All layers have experts, and one that all tokens share."""
    raw = Fields(file, DEFAULTS)
    file = {**file, "intermediate_size": raw[INNER]}  # no layer is dense
    experts = experts_config(raw, all_layers(raw), normalized=True)
    return GatedSparseConfig(**gated_fields(file, DEFAULTS), experts=experts)


def experts_config(fields: Fields, layers: frozenset[int], normalized: bool) -> ExpertsConfig:
    """The experts of these layers. The shares of a token's experts add up to 1 if `normalized`."""
    number = number_of_experts(fields)
    return ExpertsConfig(
        number, fields.size(INNER),
        Routing(per_token=experts_per_token(fields, number), normalized=normalized), layers,
        SharedExpert(
            fields.size(SHARED_SIZE), "shared_expert", is_gated=True, size_name=SHARED_SIZE
        ),
    )  # fmt: skip


def build(config: GatedSparseConfig, make: "Build") -> "CausalLM":
    """The dense model with experts instead of its feed-forward parts."""
    from nanovllm.models import parts

    def feed_forward(index: int, make: "Build") -> "FeedForward":
        is_sparse = index in config.experts.layers
        return sparse_mlp(config, make) if is_sparse else parts.mlp(config, make)

    return build_gated(config, make, feed_forward)


def draft_layer(config: GatedSparseConfig) -> GatedSparseConfig:
    """With attention and experts in layer 0, as in the draft head."""
    experts = replace(config.experts, layers=frozenset({0}))
    return replace(config, linear_layers=frozenset(), experts=experts)


FAMILY = Family(read, build, NAMES, draft_layer)
