"""Xiaomi's MiMo-V2-Flash: values shorter than keys, and windows with sinks, twice the key heads
and another rope in most layers; experts that a sigmoid chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.models import sigmoid_experts
from nanovllm.models.assumed import check_assumed
from nanovllm.models.experts import (
    ExpertsConfig,
    SparseConfig,
    expert_groups,
    experts_per_token,
    sparse_mlp,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import MAX_LAYERS, Fields, check_activation, decoder_fields, heads
from nanovllm.models.kind_ropes import KindRopesConfig, kind_ropes, ropes_of, without_ropes
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.sparse_kinds import DENSE, SPARSE, sparse_layers
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.window_pattern import FIXED
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
    "v_head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_routed_experts": 256,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "sliding_window": 129, "mlp_layer_types": None, "attention_value_scale": 0.707,
}  # fmt: skip
ASSUMED: Mapping[str, Any] = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 0,
    "attention_projection_layout": "split",
}  # fmt: skip
# Of layers with a window, which must be equal; the number of key heads may differ.
EQUAL = {
    "swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}  # fmt: skip
SPELLING = {"layernorm_epsilon": "rms_norm_eps", **sigmoid_experts.SPELLING}
THETAS = {FULL: ("rope_theta", 5_000_000.0), SLIDING: ("swa_rope_theta", 10_000.0)}
ROTATED = 0.334  # of each head
NAMES = Names(
    pieces={
        "self_attn.attention_sink_bias": "self_attn.sinks",
    },
    skipped=("model.mtp.",),
)


@dataclass(frozen=True, kw_only=True)
class MiMoV2Config(KindRopesConfig, SparseConfig):
    """With the key heads of layers with a window, and the size and the factor of values."""

    sliding_kv_heads: int
    value_dim: int
    value_scale: float

    def heads(self, index: int) -> KeysAndValues:
        usual = super().heads(index)
        return usual if usual.window is None else replace(usual, num_kv_heads=self.sliding_kv_heads)

    def layer_shape(self, index: int) -> LayerShape:
        """Values are shorter; layers with a window have sinks."""
        shape, cache, hidden = super().layer_shape(index), self.heads(index), self.hidden_size
        size, has_sinks = self.value_dim, cache.window is not None
        changed = {
            "self_attn.v_proj": (cache.num_kv_heads * size, hidden),
            "self_attn.o_proj": (hidden, cache.num_heads * size),
        }
        matrices = (
            MatrixShape(each.name, *changed.get(each.name, each[1:3]), each.is_experts)
            for each in shape.matrices
        )
        short = cache.num_kv_heads * (cache.head_dim - size) * self.qkv_bias
        return replace(
            shape, matrices=tuple(matrices),
            num_others=shape.num_others - short + cache.num_heads * has_sinks,
            needs=frozenset({"sinks"} if has_sinks else ()),
        )  # fmt: skip


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> MiMoV2Config:
    """The fields of published files, or as transformers writes them."""
    check_assumed(file, ASSUMED)
    plain = respelt(without_ropes(file), SPELLING, both=True)
    fields = Fields(plain, DEFAULTS, FIXED)
    check_activation(fields)
    check_assumed(file, {theirs: fields[ours] for theirs, ours in EQUAL.items()})
    num_layers = fields.size("num_hidden_layers", MAX_LAYERS)
    fields["layer_types"] = _layer_types(fields, num_layers)
    fields["sliding_window"] = _window(fields)
    decoder = decoder_fields(fields)
    head_dim, scale = decoder["head_dim"], fields["attention_value_scale"]
    ropes = kind_ropes(file, fields, head_dim, {*fields["layer_types"]}, _old_ropes(file), ROTATED)
    return MiMoV2Config(
        **decoder | ropes,
        qkv_bias=fields.flag("attention_bias"),
        sliding_kv_heads=_sliding_kv_heads(fields),
        value_dim=fields.size("v_head_dim", head_dim),
        value_scale=1.0 if scale is None else fields.number("attention_value_scale"),
        experts=_experts(fields, num_layers),
    )


def _layer_types(fields: Fields, num_layers: int) -> Any:
    """Published files have `hybrid_layer_pattern`, with a 1 for each layer with a window."""
    given, flags = fields["layer_types"], fields.get("hybrid_layer_pattern")
    if flags is None:
        if given is not None:
            return given
        full = (index == 0 or index % 6 == 5 for index in range(num_layers))
        return [FULL if is_full else SLIDING for is_full in full]
    types = [
        SLIDING if flag else FULL for flag in _flags("hybrid_layer_pattern", flags, num_layers)
    ]
    if given not in (None, types):
        raise ValueError(
            f"hybrid_layer_pattern={shorten(flags)} contradicts layer_types={shorten(given)}"
        )
    return types


def _flags(name: str, flags: Any, num_layers: int) -> list[int]:
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise ValueError(f"{name} must be a list of {num_layers} numbers, got {shorten(flags)}")
    return [check_int(name, flag, 0, 1) for flag in flags]


def _window(fields: Fields) -> Any:
    """The `sliding_window_size` of published files leaves out the token itself."""
    size = fields.get("sliding_window_size")
    return fields["sliding_window"] if size is None else fields.size("sliding_window_size") + 1


def _old_ropes(file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The ropes of files without `rope_parameters`."""
    part = file.get("partial_rotary_factor")
    others = {"rope_type": "default", "partial_rotary_factor": ROTATED if part is None else part}
    thetas = {kind: file.get(name) for kind, (name, _) in THETAS.items()}
    return {
        kind: {**others, "rope_theta": THETAS[kind][1] if theta is None else theta}
        for kind, theta in thetas.items()
    }


def _sliding_kv_heads(fields: Fields) -> int:
    """The key heads of layers with a window: twice those of the others, or as the file says."""
    num_heads, num_kv_heads, _ = heads(fields)
    name = "swa_num_key_value_heads"
    found = 2 * num_kv_heads if fields.get(name) is None else fields.size(name)
    if num_heads % found:
        raise ValueError(f"num_attention_heads={num_heads} must be a multiple of {name}={found}")
    return found


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Published files have `moe_layer_freq`, with a 1 for each layer with experts."""
    flags, num_experts = fields.get("moe_layer_freq"), fields.size("n_routed_experts")
    scale, name = fields["routed_scaling_factor"], "moe_layer_freq"
    layers = frozenset[int]()
    if flags is not None:
        layers = frozenset(i for i, flag in enumerate(_flags(name, flags, num_layers)) if flag)
        if fields["mlp_layer_types"] is None:
            kinds = [SPARSE if index in layers else DENSE for index in range(num_layers)]
            fields["mlp_layer_types"] = kinds
    routing = Routing(
        per_token=experts_per_token(fields, num_experts),
        normalized=fields.flag("norm_topk_prob"),
        scores="sigmoid",
        has_bias=True,
        groups=expert_groups(fields, num_experts),
        scale=1.0 if scale is None else fields.number("routed_scaling_factor"),
    )
    inner = fields.size("moe_intermediate_size")
    found = sparse_layers(fields, num_layers, name, layers)
    return ExpertsConfig(num_experts, inner, routing, found)


def build(config: MiMoV2Config, make: "Build") -> "CausalLM":
    """Llama's blocks with other attention, and experts."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.short_values import ShortValues
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> Block:
        attention = parts.attention(
            config, index, make.inside("self_attn"), ShortValues, rope=config.kind(index),
            value_dim=config.value_dim, value_scale=config.value_scale,
            has_sinks=config.sliding_windows[index] is not None,
        )  # fmt: skip
        inside, is_sparse = make.inside("mlp"), index in config.experts.layers
        part = sparse_mlp(config, inside) if is_sparse else parts.mlp(config, inside)
        return Block(make, parts.pre_norms(config), attention, part)

    embedding, blocks = parts.embedding(config, make), parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes_of(config, make))
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build, NAMES)
