"""DeepSeek V3 and R1, Moonlight, Kimi K2: latent attention, experts chosen by sigmoids."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import expert_groups, layers_after_dense
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.latents import (
    SIZES,
    SparseLatentConfig,
    check_only,
    draft_layer,
    is_interleaved,
    latent_decoder,
    latent_experts,
    latent_fields,
    routed,
)
from nanovllm.models.later_layers import OTHER_NAME, number_of_later
from nanovllm.models.sigmoid_experts import SPELLING
from nanovllm.models.spellings import errors_spell, respelt

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "rope_interleave": True, "eos_token_id": 1,
}  # fmt: skip
# What published files say of the router, which transformers does not read.
ROUTER: Mapping[str, Any] = {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
}  # fmt: skip


@errors_spell({**SPELLING, **OTHER_NAME})
def read(file: Mapping[str, Any]) -> SparseLatentConfig:
    """Every layer after the first dense ones has experts."""
    given = latent_fields(respelt(file, SPELLING, both=True), DEFAULTS)
    return SparseLatentConfig(
        **latent_decoder(given, interleaved=is_interleaved(given)),
        experts=latent_experts(given, routing(given), layers_after_dense(given)),
        num_later=number_of_later(file),
    )


def routing(fields: Fields) -> Routing:
    """A bias is added to the sigmoids for the choice: of groups, by their two best, and in them."""
    check_only(fields, ROUTER)
    num_experts, per_token = routed(fields)
    return Routing(
        per_token=per_token,
        normalized=fields.flag("norm_topk_prob"),
        scores="sigmoid",
        has_bias=True,
        groups=expert_groups(fields, num_experts),
        scale=fields.number("routed_scaling_factor"),
    )


def build(config: SparseLatentConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.latent_parts import latent_model

    return latent_model(config, make)


FAMILY = Family(read, build, draft_layer=draft_layer)
