"""Poolside's Laguna: more query heads in layers with a window, a rope for each type of layers,
softplus gates of attention, and a shared expert next to those that a sigmoid chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.cache_spec import KeysAndValues
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
from nanovllm.models.fields import (
    MAX_LAYERS,
    Fields,
    check_activation,
    decoder_fields,
    heads,
    ids,
)
from nanovllm.models.kind_ropes import KindRopesConfig, kind_ropes, ropes_of, without_ropes
from nanovllm.models.layer_kinds import checked_kinds
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.sparse_kinds import sparse_layers
from nanovllm.models.window_pattern import FIXED
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_float, check_int, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "sliding_window": 512, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
    "gating": True, "num_attention_heads_per_layer": None, "mlp_layer_types": None,
    "moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0,
}  # fmt: skip
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
ASSUMED: Mapping[str, Any] = {
    "moe_apply_router_weight_on_input": False, "norm_topk_prob": True, "attention_bias": False,
    "qkv_bias": False, "decoder_sparse_step": 1,
}  # fmt: skip
SOFT_CAP = "moe_router_logit_softcapping"
SHARED_SIZE = "shared_expert_intermediate_size"
PER_HEAD, PER_ELEMENT = "per-head", "per-element"
GATING_TYPES = {"per_head": PER_HEAD, "per_element": PER_ELEMENT}  # in lists of each layer's
NAMES = Names(
    fused={**FUSED, "qkv_proj": (*FUSED["qkv_proj"], "g_proj")},
    pieces={
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "shared_expert": "shared_experts",
    },
)


@dataclass(frozen=True, kw_only=True)
class LagunaConfig(KindRopesConfig, SparseConfig):
    """With the number of query heads of each layer, and of gates of each head."""

    query_heads: tuple[int, ...]
    gates: int

    def heads(self, index: int) -> KeysAndValues:
        return replace(super().heads(index), num_heads=self.query_heads[index])

    def layer_shape(self, index: int) -> LayerShape:
        """With the gates."""
        shape = super().layer_shape(index)
        size = self.query_heads[index] * self.gates
        gate = MatrixShape("self_attn.g_proj", size, self.hidden_size)
        return replace(shape, matrices=(*shape.matrices, gate))


def read(file: Mapping[str, Any]) -> LagunaConfig:
    """Without `layer_types`, no layer has a window."""
    check_assumed(file, ASSUMED)
    fields = Fields(without_ropes(file), DEFAULTS, FIXED)
    check_activation(fields)
    num_layers = fields.size("num_hidden_layers", MAX_LAYERS)
    if fields["layer_types"] is None:
        fields["layer_types"] = [FULL] * num_layers
    decoder = decoder_fields(fields)
    ropes = kind_ropes(file, fields, decoder["head_dim"], {*fields["layer_types"]}, ROPES, 1.0)
    return LagunaConfig(
        **decoder | ropes,
        qk_norm=True,
        query_heads=_query_heads(fields, num_layers),
        gates=_gates(fields, decoder["head_dim"], num_layers),
        experts=_experts(fields, num_layers),
    )


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """The layers of `mlp_only_layers`, if the file has it, are those without experts.

    An empty list says nothing if the file has no `mlp_layer_types`.
    """
    num_experts, name = number_of_experts(fields), "mlp_only_layers"
    dense = fields.get(name)
    says = dense != [] or fields["mlp_layer_types"] is not None
    by_dense = {*range(num_layers)} - ids(name, dense)
    cap = check_float(SOFT_CAP, fields[SOFT_CAP], 0.0)
    routing = Routing(
        per_token=experts_per_token(fields, num_experts), normalized=True, scores="sigmoid",
        has_bias=True, scale=fields.number("moe_routed_scaling_factor"), soft_cap=cap or None,
    )  # fmt: skip
    return ExpertsConfig(
        num_experts, fields.size("moe_intermediate_size"), routing,
        sparse_layers(fields, num_layers, name if says else "", by_dense),
        SharedExpert(fields.size(SHARED_SIZE), size_name=SHARED_SIZE),
    )  # fmt: skip


def _query_heads(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The number of query heads of each layer."""
    name, num_kv_heads = "num_attention_heads_per_layer", heads(fields)[1]
    given = fields[name]
    if given is None:
        return (fields["num_attention_heads"],) * num_layers
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(f"{name} must be a list of {num_layers} numbers, got {shorten(given)}")
    found = tuple(check_int(name, number, 1) for number in given)
    if odd := [number for number in found if number % num_kv_heads]:
        raise ValueError(
            f"{name} must have multiples of num_key_value_heads={num_kv_heads}, got {odd[0]}"
        )
    return found


def _gates(fields: Fields, head_dim: int, num_layers: int) -> int:
    """The number of gates of each head. `gating_types` of the file must agree for all layers."""
    gating = PER_HEAD if fields["gating"] is True else fields["gating"]
    if gating not in (PER_HEAD, PER_ELEMENT):
        choices = f"true, {PER_HEAD!r} or {PER_ELEMENT!r}"
        raise ValueError(f"gating must be {choices}, got {shorten(gating)}")
    types, allowed = fields.get("gating_types"), (*GATING_TYPES, PER_HEAD, PER_ELEMENT)
    kinds = () if types is None else checked_kinds("gating_types", types, allowed, num_layers)
    if any(GATING_TYPES.get(kind, kind) != gating for kind in kinds):
        raise ValueError(f"gating_types={shorten(types)} contradict gating={gating!r}")
    return 1 if gating == PER_HEAD else head_dim


def build(config: LagunaConfig, make: "Build") -> "CausalLM":
    """Llama's blocks with other attention, and experts."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.output_gate import SoftplusGate
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> Block:
        attention = parts.attention(
            config, index, make.inside("self_attn"), SoftplusGate,
            gates=config.gates, rope=config.kind(index),
        )  # fmt: skip
        inside, is_sparse = make.inside("mlp"), index in config.experts.layers
        part = sparse_mlp(config, inside) if is_sparse else parts.mlp(config, inside)
        return Block(make, parts.pre_norms(config), attention, part)

    embedding, blocks = parts.embedding(config, make), parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes_of(config, make))
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build, NAMES)
