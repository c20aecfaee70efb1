"""GLM-4.7-Flash: the form of DeepSeek V3, with a list of the layers that have experts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models import deepseek_v3
from nanovllm.models.experts import layers_after_dense
from nanovllm.models.family import Family
from nanovllm.models.fields import MAX_LAYERS
from nanovllm.models.latents import (
    SparseLatentConfig,
    draft_layer,
    latent_decoder,
    latent_experts,
    latent_fields,
)
from nanovllm.models.later_layers import OTHER_NAME, number_of_later
from nanovllm.models.sigmoid_experts import SPELLING
from nanovllm.models.sparse_kinds import sparse_layers
from nanovllm.models.spellings import errors_spell, respelt

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
    "mlp_layer_types": None, "norm_topk_prob": True, "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5, "rope_interleave": True, "eos_token_id": 1,
}  # fmt: skip


@errors_spell({**SPELLING, **OTHER_NAME})
def read(file: Mapping[str, Any]) -> SparseLatentConfig:
    """Without a list, every layer but the first has experts."""
    fields = latent_fields(respelt(file, SPELLING, both=True), DEFAULTS)
    name, number = "first_k_dense_replace", fields.size("num_hidden_layers", MAX_LAYERS)
    by_first = () if fields.get(name) is None else layers_after_dense(fields)
    layers = sparse_layers(fields, number, name, by_first)
    return SparseLatentConfig(
        **latent_decoder(fields, interleaved=fields.flag("rope_interleave")),
        experts=latent_experts(fields, deepseek_v3.routing(fields), layers),
        num_later=number_of_later(file),
    )


def build(config: SparseLatentConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.models.latent_parts import latent_model

    return latent_model(config, make)


FAMILY = Family(read, build, draft_layer=draft_layer)
