"""Ling 3: channel delta nets in most layers, latent attention with a gate for each head in others.

Experts are chosen as in DeepSeek V3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.layers.channel_delta_sizes import DIRECT, ChannelDeltaSizes
from nanovllm.models.deepseek_v3 import routing
from nanovllm.models.delta_latents import (
    MIXER,
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
from nanovllm.models.fields import Fields
from nanovllm.models.hybrid import layers_by_interval
from nanovllm.models.latents import latent_decoder, latent_experts, latent_fields
from nanovllm.models.later_layers import OTHER_NAME, number_of_later
from nanovllm.models.layer_kinds import LINEAR
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_float, check_int

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 157_184, "hidden_size": 2560, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 42, "num_attention_heads": 32,
    "n_shared_experts": 1, "num_local_experts": 512, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "first_k_dense_replace": 2, "mlp_layer_types": None, "max_position_embeddings": 262_144,
    "rope_theta": 6e6, "eos_token_id": 156_895, "head_dim": 128, "short_conv_kernel_size": 4,
    "layer_group_size": 6, "kda_safe_gate": True, "kda_lower_bound": -5.0,
}  # fmt: skip
SPELLING = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group", "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
# The sizes of delta nets, and the fields that have them unless the file has fields of their own.
SIZES = {
    "linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
INTERVAL, UNREAD = "layer_group_size", ("layer_types", "head_dim")


@dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(DeltaLatentConfig):
    """With a gate for each head of attention."""

    def layer_shape(self, index: int) -> LayerShape:
        shape = super().layer_shape(index)
        if index in self.linear_layers:
            return shape
        gate = MatrixShape(f"{MIXER}.g_proj", self.latent.num_heads, self.hidden_size)
        return replace(shape, matrices=(*shape.matrices, gate))


@errors_spell(SPELLING | SPELT_EXPERTS | OTHER_NAME)
def read(file: Mapping[str, Any]) -> BailingHybridConfig:
    """Layers whose number `layer_group_size` divides have attention, from 1 on."""
    plain = {name: value for name, value in file.items() if name not in UNREAD}
    plain = respelt(plain, SPELLING, both=True)
    fields = with_experts(latent_fields(plain | {"q_lora_rank": None}, DEFAULTS))
    decoder = latent_decoder(fields, interleaved=True)
    number = decoder["num_hidden_layers"]
    linear = layers_by_interval(number, fields.size(INTERVAL))
    kinds = [LINEAR if index in linear else FULL for index in range(number)]
    return BailingHybridConfig(
        **decoder,
        experts=latent_experts(fields, routing(fields), layers_with_experts(fields, file)),
        delta=_sizes(fields, file),
        linear_layers=linear_layers(file, number, kinds, INTERVAL),
        num_later=number_of_later(file),
    )


def _sizes(fields: Fields, file: Mapping[str, Any]) -> ChannelDeltaSizes:
    given = {**DEFAULTS, **file}
    heads, dim, width = (
        check_int(name if name in file else other, file.get(name, given[other]), low)
        for (name, other), low in zip(SIZES.items(), (1, 2, 2), strict=True)
    )  # fmt: skip
    lowest = check_float("kda_lower_bound", fields["kda_lower_bound"], -80.0, 0.0)
    if lowest == 0:  # nothing would be forgotten, and kernels read 0 as no bound
        raise ValueError("kda_lower_bound must be below 0, got 0.0")
    return ChannelDeltaSizes(
        heads=heads, dim=dim, width=width, low_rank=False, rates_shape=(heads,),
        lowest=lowest if fields.flag("kda_safe_gate") else None,
    )  # fmt: skip


def build(config: BailingHybridConfig, make: "Build") -> "CausalLM":
    """Compose the model. Tensors of layers that predict later tokens are skipped."""
    from nanovllm.layers.gated_latent_attention import GatedLatentAttention
    from nanovllm.models import parts
    from nanovllm.models.later_layers import without_later

    block = mixed_block(config, GatedLatentAttention)
    return without_later(parts.causal_lm(config, make, block), config)


NAMES = DeltaLatentNames(
    fused=fused_names(DIRECT),
    pieces={
        "word_embeddings": "embed_tokens", "attention": "self_attn",
        "attention.dense": "self_attn.o_proj", "expert_bias": "e_score_correction_bias",
    },
)  # fmt: skip
FAMILY = Family(read, build, NAMES)
