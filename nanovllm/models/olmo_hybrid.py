"""OLMo Hybrid: gated delta nets that may change a memory's sign, with OLMo 3's attention between.

Layers with attention have norms after their parts, the others before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.layers.delta_sizes import DeltaNames
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields, heads
from nanovllm.models.hybrid import MIXER, HybridConfig, delta_net, hybrid_fields
from nanovllm.models.layer_kinds import LINEAR
from nanovllm.models.olmo2 import Olmo2Config
from nanovllm.models.olmo2 import block as attention_block
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.block import Block
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 30, "max_position_embeddings": 65_536,
    "eos_token_id": 100_257, "linear_num_key_heads": None, "linear_num_value_heads": None,
    "linear_key_head_dim": None, "linear_value_head_dim": None, "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}  # fmt: skip
TENSORS = DeltaNames(
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"},
    norm="o_norm", out_proj="o_proj",
)  # fmt: skip
INTERVAL = 4  # of layers with attention, if the file does not list them
GATE_EPS = 1e-5  # of the norms with gates, whatever `rms_norm_eps` says
NAMES = Names(
    fused={
        **FUSED, "in_proj": tuple(TENSORS.projections),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    },
    pieces={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(HybridConfig, Olmo2Config):
    """A head learns by at most `most`."""

    delta_names = TENSORS
    most: float


def read(file: Mapping[str, Any]) -> OlmoHybridConfig:
    """The config. If `rope_theta` is null, no layer rotates queries and keys."""
    fields = _with_defaults(Fields(file, DEFAULTS))
    check_activation(fields)
    hybrid, bias = hybrid_fields(fields, INTERVAL), fields.flag("attention_bias")
    if len(hybrid["linear_layers"]) in (0, fields["num_hidden_layers"]):
        raise ValueError(f"layer_types must have both {FULL} and {LINEAR}")
    usual = _usual(file, _rotates(file))
    most = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    return OlmoHybridConfig(**usual, **hybrid, qkv_bias=bias, o_bias=bias, most=most)


def _rotates(file: Mapping[str, Any]) -> bool:
    """Whether attention has a rope: not if `rope_theta` is null."""
    given = file.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"rope_parameters must be an object, got {shorten(given)}")
    return bool(given.get("rope_theta", file.get("rope_theta", True)) is not None)


def _usual(file: Mapping[str, Any], rotates: bool) -> dict[str, Any]:
    """The fields of every decoder."""
    file = {n: v for n, v in file.items() if rotates or not n.startswith("rope_")}
    usual = decoder_fields(Fields({**file, "layer_types": None}, DEFAULTS, NO_WINDOW))
    return usual | {"rotated_layers": (rotates,) * usual["num_hidden_layers"]}


def _with_defaults(fields: Fields) -> Fields:
    """The fields with the sizes of heads that depend on others."""
    num_heads, _, _ = heads(fields)
    found = {**fields}

    def default(name: str, value: int) -> int:
        if found[f"linear_{name}"] is None:
            found[f"linear_{name}"] = value
        return check_int(f"linear_{name}", found[f"linear_{name}"], 1)

    default("num_value_heads", num_heads)
    key_heads = default("num_key_heads", num_heads)
    key_dim = default("key_head_dim", int(0.75 * fields.size("hidden_size") / max(1, key_heads)))
    default("value_head_dim", 2 * key_dim)
    if found["layer_types"] is None and fields.size("num_hidden_layers") < 4:
        found["layer_types"] = [LINEAR] * (fields["num_hidden_layers"] - 1) + [FULL]
    return Fields(found, DEFAULTS)


def build(config: OlmoHybridConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.summed_block import SummedBlock
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> "Block":
        if index not in config.linear_layers:
            return attention_block(config, index, make)
        mixer = delta_net(config, make, GATE_EPS, config.most)
        mlp = parts.mlp(config, make.inside("mlp"))
        is_last = index + 1 == config.num_hidden_layers
        kind = Block if is_last or index + 1 in config.linear_layers else SummedBlock
        return kind(make, parts.pre_norms(config), mixer, mlp, mixer_name=MIXER)

    embedding, blocks = parts.embedding(config, make), parts.blocks(config, make, block)
    ropes = {ROPE: parts.rope(config, make)} if any(config.rotated_layers) else {}
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build, NAMES)
