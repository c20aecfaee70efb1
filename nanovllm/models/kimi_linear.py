"""Kimi Linear: channel delta nets in most layers, latent attention without rotation in the others.

Experts are chosen as in DeepSeek V3.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.layers.channel_delta_sizes import LOW_RANK, ChannelDeltaSizes
from nanovllm.models.deepseek_v3 import routing
from nanovllm.models.delta_latents import (
    FIRST,
    SPELT_EXPERTS,
    DeltaLatentConfig,
    DeltaLatentNames,
    fused_names,
    layers_with_experts,
    linear_layers,
    mixed_block,
    with_experts,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, ids
from nanovllm.models.latents import check_only, latent_decoder, latent_experts, latent_fields
from nanovllm.models.layer_kinds import LINEAR
from nanovllm.models.mixtral import EXPERTS
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "n_shared_experts": 1, "num_local_experts": 256, "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "mlp_layer_types": None,
    "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5, "eos_token_id": 163_586,
    "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SPELLING = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group", "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
NESTED, LISTS = "linear_attn_config", ("full_attn_layers", "kda_layers")
FIRST_DENSE = 1  # layers, if the file does not say which have experts
UNREAD = (NESTED, "head_dim", "layer_types")
OF_NESTED = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
# What published files say that transformers does not read.
ONLY: Mapping[str, Any] = {
    "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


@errors_spell(SPELLING | SPELT_EXPERTS)
def read(file: Mapping[str, Any]) -> DeltaLatentConfig:
    """The fields of ropes and `head_dim` are not read, as in transformers."""
    nested = file.get(NESTED) or {}
    if not isinstance(nested, Mapping):
        raise TypeError(f"{NESTED} must be an object, got {shorten(nested)}")
    plain = {n: v for n, v in file.items() if n not in UNREAD and not n.startswith("rope_")}
    plain = {FIRST: FIRST_DENSE} | respelt(_with_sizes(plain, nested), SPELLING, both=True)
    fields = with_experts(latent_fields(plain, DEFAULTS))
    check_only(fields, ONLY)
    decoder = latent_decoder(fields, interleaved=False)
    number = decoder["num_hidden_layers"]
    by_nested = _kinds(nested, number)
    kinds = by_nested or [FULL if i and i % 4 == 0 else LINEAR for i in range(number)]
    return DeltaLatentConfig(
        **decoder | {"rotated_layers": (False,) * number},
        experts=latent_experts(fields, routing(fields), layers_with_experts(fields, file)),
        delta=_sizes(fields),
        linear_layers=linear_layers(file, number, kinds, NESTED if by_nested else ""),
    )


def _sizes(fields: Fields) -> ChannelDeltaSizes:
    heads, width = fields.size("linear_num_heads"), "linear_conv_kernel_dim"
    return ChannelDeltaSizes(
        heads=heads, dim=fields.size("linear_head_dim"), width=check_int(width, fields[width], 2),
        low_rank=True, rates_shape=(1, 1, heads, 1),
    )  # fmt: skip


def _with_sizes(file: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with those of `linear_attn_config` among them, by their other names."""
    fields = dict(file)
    for theirs, name in OF_NESTED.items():
        if theirs in nested and fields.setdefault(name, nested[theirs]) != nested[theirs]:
            raise ValueError(f"{NESTED}.{theirs} and {name} differ; keep one of them")
    return fields


def _kinds(nested: Mapping[str, Any], number: int) -> list[str] | None:
    """The kinds of layers by two lists of their numbers, from 1 on; None without these lists."""
    full, linear = (ids(f"{NESTED}.{name}", nested.get(name)) for name in LISTS)
    if not full and not linear:
        return None
    if len(full) + len(linear) != number or full | linear != {*range(1, number + 1)}:
        raise ValueError(
            f"{NESTED}: {' and '.join(LISTS)} must have each of the numbers 1 to {number} once"
        )
    return [FULL if index in full else LINEAR for index in range(1, number + 1)]


def build(config: DeltaLatentConfig, make: "Build") -> "CausalLM":
    """Compose the model. Its attention calls kernels that rotate, with a rope that does not."""
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.no_rotation import NoRotation
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    ropes = {ROPE: NoRotation(config.latent.rotated)}
    blocks, embedding = (
        parts.blocks(config, make, mixed_block(config)),
        parts.embedding(config, make),
    )
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


NAMES = DeltaLatentNames(
    fused=fused_names(LOW_RANK), experts=EXPERTS, pieces={"block_sparse_moe": "mlp"}
)
FAMILY = Family(read, build, NAMES)
