"""GLM-4.5, 4.6 and 4.7: Llama with experts after the first layers, partly rotated heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.models.experts import SparseConfig, layers_after_dense, sparse_model
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.later_layers import (
    OTHER_NAME,
    LaterLayersConfig,
    number_of_later,
    without_later,
)
from nanovllm.models.sigmoid_experts import SPELLING, sigmoid_experts
from nanovllm.models.spellings import errors_spell, partly_rotated, respelt

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "use_qk_norm": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LaterLayersConfig, SparseConfig):
    """With experts, and layers behind those of the model."""


@errors_spell({**SPELLING, **OTHER_NAME})
def read(file: Mapping[str, Any]) -> Glm4MoeConfig:
    """Half of each head is rotated, if the file does not say otherwise."""
    file = partly_rotated(respelt(file, SPELLING, both=True), 0.5)
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    return Glm4MoeConfig(
        **decoder_fields(fields, partial_rotary=True),
        qk_norm=fields.flag("use_qk_norm"),
        qkv_bias=fields.flag("attention_bias"),
        experts=sigmoid_experts(fields, layers_after_dense(fields)),
        num_later=number_of_later(file),
    )


def build(config: Glm4MoeConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    return without_later(sparse_model(config, make), config)


def draft_layer(config: Glm4MoeConfig) -> Glm4MoeConfig:
    """With experts in layer 0, as in the draft head."""
    return replace(config, experts=replace(config.experts, layers=frozenset({0})))


FAMILY = Family(read, build, draft_layer=draft_layer)
