"""GraniteMoE: Llama with experts in all layers, and factors of embeddings, scores and sums."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SparseConfig,
    all_layers,
    experts_per_token,
    sparse_mlp,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.granite import GraniteConfig, factors
from nanovllm.models.granite import build as build_granite

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "eos_token_id": 2, "num_experts_per_tok": 2, "num_local_experts": 8,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
# The files have one tensor for the matrices of all experts. transformers' modules have our names.
PIECES = {
    "block_sparse_moe.router": "mlp.gate", "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe": "mlp",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(GraniteConfig, SparseConfig):
    """With Granite's factors and experts."""


def read(file: Mapping[str, Any]) -> GraniteMoeConfig:
    """A token's shares are the softmax over the outputs of its experts."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    num_experts = fields.size("num_local_experts")
    per_token = experts_per_token(fields, num_experts)
    routing = Routing(per_token=per_token, normalized=True, scores="softmax of chosen")
    return GraniteMoeConfig(
        **decoder_fields(fields),
        **factors(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        experts=ExpertsConfig(
            num_experts,
            fields.size("intermediate_size"),
            routing,
            all_layers(fields),
            size_name="intermediate_size",
        ),
    )


def build(config: GraniteMoeConfig, make: "Build") -> "CausalLM":
    """Granite with experts."""
    return build_granite(config, make, sparse_mlp)


FAMILY = Family(read, build, Names(pieces=PIECES))
