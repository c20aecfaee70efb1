"""DeepSeek V2, V2.5 and Coder V2, also Lite: latent attention, experts chosen by a softmax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import ExpertGroups, Routing
from nanovllm.models.experts import expert_groups, layers_after_dense
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.latents import (
    SIZES,
    SparseLatentConfig,
    check_only,
    latent_decoder,
    latent_experts,
    latent_fields,
    routed,
)
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.utils.checks import check_choice

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008,
    "moe_intermediate_size": 1407, "num_hidden_layers": 32, "num_attention_heads": 32,
    "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "n_group": None,
    "topk_group": None, "topk_method": "greedy", "num_experts_per_tok": None,
    "first_k_dense_replace": 0, "norm_topk_prob": False, "max_position_embeddings": 2048,
    "eos_token_id": 2,
}  # fmt: skip
SPELLING = {"num_experts": "n_routed_experts"}  # transformers reads both
GREEDY, LIMITED = "greedy", "group_limited_greedy"
# What is not computed, or what published files say that transformers does not read.
ONLY: Mapping[str, Any] = {
    "scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False, "moe_layer_freq": 1,
}  # fmt: skip


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> SparseLatentConfig:
    """Every layer after the first dense ones has experts."""
    fields = latent_fields(respelt(file, SPELLING, both=True), DEFAULTS)
    check_only(fields, ONLY)
    num_experts, per_token = routed(fields)
    routing = Routing(
        per_token=per_token,
        normalized=False,
        groups=_groups(fields, num_experts),
        scale=fields.number("routed_scaling_factor"),
    )
    return SparseLatentConfig(
        **latent_decoder(fields, interleaved=True),
        experts=latent_experts(fields, routing, layers_after_dense(fields)),
    )


def _groups(fields: Fields, num_experts: int) -> ExpertGroups | None:
    """The groups that limit the choice, by the best expert of each; "greedy" has none."""
    if check_choice("topk_method", fields["topk_method"], [GREEDY, LIMITED]) == GREEDY:
        return None
    for name in ("n_group", "topk_group"):
        fields.size(name)  # null is no number of groups, which this method needs
    return expert_groups(fields, num_experts, best=1)


def build(config: SparseLatentConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.latent_parts import latent_model

    return latent_model(config, make)


FAMILY = Family(read, build)
