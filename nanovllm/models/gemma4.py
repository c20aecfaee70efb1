"""Gemma 4, text only: E2B, E4B, 26B-A4B, 31B."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.sizes import ExpertSizes
from nanovllm.models.family import Family
from nanovllm.models.layer_heads import head_dims, layer_heads
from nanovllm.models.shapes import ExpertCount, LayerShape, MatrixShape, gated_matrices
from nanovllm.models.shared_layers import SharedConfig, layer_types, shared_fields
from nanovllm.models.typed_ropes import typed_ropes
from nanovllm.models.windows import FULL, SLIDING
from nanovllm.utils.checks import check_bool, check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True,
    "attention_bias": False, "rope_parameters": None, "layer_types": None, "sliding_window": 512,
    "final_logit_softcapping": None, "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None,
    "moe_intermediate_size": None,
}  # fmt: skip
NAMES = Names(fused={**FUSED, "qk_proj": ("q_proj", "k_proj")})
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharedConfig):
    """`sizes_of_heads` has the number of key heads and the head size of each layer."""

    sizes_of_heads: tuple[tuple[int, int], ...]
    keys_are_values: bool  # in layers without a window
    is_double_wide: bool  # the dense part of layers without keys
    experts: ExpertSizes | None

    def own_heads(self, index: int) -> KeysAndValues:
        kv_heads, head_dim = self.sizes_of_heads[index]
        window = self.sliding_windows[index]
        return KeysAndValues(self.num_attention_heads, kv_heads, head_dim, window)

    def has_values(self, index: int) -> bool:
        """Whether a layer has a projection of values."""
        return not self.keys_are_values or self.layer_types[index] != FULL

    def attention_matrices(self, index: int) -> tuple[MatrixShape, ...]:
        matrices = super().attention_matrices(index)
        without = () if self.has_values(index) else ("self_attn.v_proj",)
        return tuple(matrix for matrix in matrices if matrix.name not in without)

    def inner_size(self, index: int) -> int:
        """The intermediate size of the dense part."""
        doubles = self.is_double_wide and self.lenders[index] is not None
        return self.intermediate_size * (1 + doubles)

    def layer_shape(self, index: int) -> LayerShape:
        """Four norms of hidden states and the scalar; with experts, the router's scales, too."""
        hidden, inner, experts = self.hidden_size, self.inner_size(index), self.experts
        others = 4 * hidden + 1 + self.num_attention_others(index)
        shape = LayerShape(
            self.heads(index),
            (*self.attention_matrices(index), *gated_matrices(hidden, inner),
             *self.per_layer_matrices()),
            others + self.num_per_layer_others(index),
            {"intermediate_size": self.intermediate_size},
        )  # fmt: skip
        if experts is None:
            return shape
        total, per_token, inner = experts
        router = MatrixShape("router.proj", total, hidden)
        of_experts = gated_matrices(hidden, inner, "experts.0", is_experts=True)
        return replace(
            shape, matrices=(*shape.matrices, router, *of_experts),
            num_others=shape.num_others + 4 * hidden + total,
            split_experts={"moe_intermediate_size": inner},
            experts=ExpertCount(total, per_token),
        )  # fmt: skip


def read(file: Mapping[str, Any]) -> Gemma4Config:
    """`use_bidirectional_attention` may be "vision", which text does not use."""
    raw = {**DEFAULTS, **file}
    seen = raw["use_bidirectional_attention"]
    if seen not in (None, "vision"):
        name = "use_bidirectional_attention"
        raise ValueError(f"{name} must be null or 'vision', got {shorten(seen)}")
    types = layer_types(raw, every=6, last_is_full=True)
    shared = shared_fields(file, DEFAULTS, types)
    sizes = layer_heads(raw, types)
    config = Gemma4Config(
        **shared,
        ropes=typed_ropes(raw["rope_parameters"], ROPES, head_dims(types, sizes)),
        sizes_of_heads=sizes,
        keys_are_values=check_bool("attention_k_eq_v", raw["attention_k_eq_v"]),
        is_double_wide=check_bool("use_double_wide_mlp", raw["use_double_wide_mlp"]),
        experts=experts(raw),
    )
    if config.per_layer and config.per_layer.vocab_size < config.vocab_size:
        given = f"vocab_size_per_layer_input={config.per_layer.vocab_size}"
        raise ValueError(f"{given} is below vocab_size={config.vocab_size}")
    return config


def experts(raw: Mapping[str, Any]) -> ExpertSizes | None:
    """The experts of each layer, if there are any."""
    if not check_bool("enable_moe_block", raw["enable_moe_block"]):
        return None
    total = check_int("num_experts", raw["num_experts"], 1)
    per_token = check_int("top_k_experts", raw["top_k_experts"], 1, total)
    return ExpertSizes(
        total, per_token, check_int("moe_intermediate_size", raw["moe_intermediate_size"], 1)
    )


def build(config: Gemma4Config, make: "Build") -> "CausalLM":
    """Blocks with norms around their parts; some share keys, and all may have experts."""
    from nanovllm.layers.feed_forward import MLP
    from nanovllm.layers.gelu import GeluTanhAndMul
    from nanovllm.layers.joined_experts import JoinedBlock
    from nanovllm.layers.norm_places import sandwich_norms
    from nanovllm.layers.scaled_block import ScaledBlock
    from nanovllm.models import parts
    from nanovllm.models.shared_parts import SharedAttentions, shared_model

    attentions, hidden = SharedAttentions(config), config.hidden_size

    def block(index: int, make: "Build") -> ScaledBlock:
        norms = sandwich_norms(*(parts.norm(config) for _ in range(4)))
        attention = attentions.make(
            index, make.inside("self_attn"), keys_are_values=not config.has_values(index)
        )
        inside, inner = make.inside("mlp"), config.inner_size(index)
        mlp = MLP(inside, hidden, inner, activation=GeluTanhAndMul)
        args = make, hidden, config.rms_norm_eps, norms, attention, mlp, config.per_layer
        if config.experts is None:
            return ScaledBlock(*args)
        return JoinedBlock(*args, sizes=config.experts)

    return shared_model(config, make, block)


FAMILY = Family(read, build, NAMES)
