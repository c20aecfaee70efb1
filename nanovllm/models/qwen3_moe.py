"""Qwen3 with experts in all layers, or in some: 30B-A3B, 235B-A22B."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.experts import ExpertsConfig, SparseConfig, sparse_mlp
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, check_activation, decoder_fields, ids
from nanovllm.models.qwen3 import SIZES
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "norm_topk_prob": False,
}  # fmt: skip


def read(file: Mapping[str, Any]) -> SparseConfig:
    """If there is a window, all layers have it."""
    fields = Fields(file, DEFAULTS, EVERY_LAYER)
    check_activation(fields)
    return SparseConfig(
        **decoder_fields(fields),
        qk_norm=True,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        experts=_experts(fields),
    )


def _experts(fields: Fields) -> ExpertsConfig:
    """Read the experts. Transformers 5 writes `num_experts` as `num_local_experts`."""
    spelt = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts, step = fields.size(spelt), fields.size("decoder_sparse_step")
    dense = fields["mlp_only_layers"]
    if dense is not None and not isinstance(dense, list):
        raise TypeError(f"mlp_only_layers must be a list of numbers, got {shorten(dense)}")
    layers = range(step - 1, fields["num_hidden_layers"], step)
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=check_int("num_experts_per_tok", fields["num_experts_per_tok"], 1, num_experts),
        intermediate_size=fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        layers=frozenset(layers) - ids("mlp_only_layers", dense),
    )


def build(config: SparseConfig, make: "Build") -> "CausalLM":
    """Qwen3, with experts instead of the gated layer where the config says so."""
    from nanovllm.layers.block import Block
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        is_sparse, inside = index in config.experts.layers, make.inside("mlp")
        return Block(
            make,
            parts.pre_norms(config),
            parts.attention(config, index, make.inside("self_attn")),
            sparse_mlp(config, inside) if is_sparse else parts.mlp(config, inside),
        )

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build)
