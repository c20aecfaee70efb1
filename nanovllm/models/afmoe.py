"""Arcee's Trinity (AFMoE): windows in most layers, and only these rotate; gates of attention;
norms before and after each part; a shared expert, and a factor of those that a sigmoid chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.assumed import check_assumed
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    experts_per_token,
    number_of_experts,
    sparse_mlp,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.window_pattern import FIXED, with_layer_types
from nanovllm.utils.checks import check_int

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 200_192, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 1408, "num_hidden_layers": 32, "num_dense_layers": 1,
    "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
    "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024,
    "mup_enabled": False,
}  # fmt: skip
ASSUMED: Mapping[str, Any] = {
    "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
    "num_expert_groups": 1, "num_limited_groups": 1, "attention_bias": False,
}  # fmt: skip
SHARED_SIZE = "moe_intermediate_size * num_shared_experts"
NAMES = Names(
    fused={**FUSED, "qkv_proj": (*FUSED["qkv_proj"], "gate_proj")},
    pieces={
        "mlp.router.gate": "mlp.gate", "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(SparseConfig):
    """With the factor of embeddings."""

    embedding_scale: float

    def layer_shape(self, index: int) -> LayerShape:
        """With gates of attention, and two more norms."""
        shape, heads = super().layer_shape(index), self.heads(index)
        size = heads.num_heads * heads.head_dim
        gate = MatrixShape("self_attn.gate_proj", size, self.hidden_size)
        others = shape.num_others + 2 * self.hidden_size
        return replace(shape, matrices=(*shape.matrices, gate), num_others=others)


def read(file: Mapping[str, Any]) -> AfmoeConfig:
    """Layers without a window do not rotate. Without `layer_types`, they are every Nth."""
    check_assumed(file, ASSUMED)
    name = "global_attn_every_n_layers"
    interval = file.get(name, DEFAULTS[name])
    if interval is None and file.get("layer_types") is not None:
        interval = DEFAULTS[name]  # not used next to `layer_types`
    interval = check_int(name, interval, 1)
    fields = Fields(with_layer_types(file, DEFAULTS, interval), DEFAULTS, FIXED)
    check_activation(fields)
    decoder = decoder_fields(fields)
    decoder["rotated_layers"] = tuple(w is not None for w in decoder["sliding_windows"])
    num_layers, num_experts = decoder["num_hidden_layers"], number_of_experts(fields)
    num_dense = check_int("num_dense_layers", fields["num_dense_layers"], 0)
    inner = fields.size("moe_intermediate_size")
    shared = inner * fields.size("num_shared_experts")
    routing = Routing(
        per_token=experts_per_token(fields, num_experts), normalized=True, scores="sigmoid",
        has_bias=True, scale=fields.number("route_scale"),
    )  # fmt: skip
    return AfmoeConfig(
        **decoder,
        qk_norm=True,
        embedding_scale=decoder["hidden_size"] ** 0.5 if fields.flag("mup_enabled") else 1.0,
        experts=ExpertsConfig(
            num_experts, inner, routing, frozenset(range(num_dense, num_layers)),
            SharedExpert(shared, size_name=SHARED_SIZE),
        ),
    )  # fmt: skip


def build(config: AfmoeConfig, make: "Build") -> "CausalLM":
    """Blocks with norms around their parts."""
    from nanovllm.layers.block import Block, Norms
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.output_gate import OutputGate
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> Block:
        names = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm",
                 "post_mlp_layernorm")  # fmt: skip
        norms = Norms(*((name, parts.norm(config)) for name in names))
        attention = parts.attention(
            config, index, make.inside("self_attn"), OutputGate, gates=config.head_dim
        )
        inside, is_sparse = make.inside("mlp"), index in config.experts.layers
        part = sparse_mlp(config, inside) if is_sparse else parts.mlp(config, inside)
        return Block(make, norms, attention, part)

    embedding = parts.embedding(config, make, config.embedding_scale)
    blocks, ropes = parts.blocks(config, make, block), {ROPE: parts.rope(config, make)}
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build, NAMES)
