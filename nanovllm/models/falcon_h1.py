"""Falcon-H1: attention and a state space side by side in each block, and many factors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.layers.several_caches import SeveralCaches
from nanovllm.layers.state_space import StateSpace
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields, ids
from nanovllm.models.layer_kinds import without_kinds
from nanovllm.models.shapes import LayerShape, attention_matrices, gated_matrices
from nanovllm.models.state_spaces import (
    MAMBA_SIZES,
    head_size,
    space_matrices,
    space_sizes,
    time_limits,
)
from nanovllm.utils.checks import check_float, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.side_by_side_block import SideBySideBlock
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "eos_token_id": 2,
    "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "projectors_bias": False, "time_step_limit": (0.0, float("inf")), "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0, "mlp_multipliers": None, "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip
SINGLE = (
    "lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out",
)  # fmt: skip
NAMES = Names(prefixes={"model.final_layernorm.": "model.norm."})


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(ModelConfig):
    """With the state space of all layers, and factors by the names of `SINGLE`.

    `of_projection` has those of a state space's gate, channels, B, C and time steps; `of_mlp` those
    of the gate and of the output.
    """

    space: StateSpace
    factors: Mapping[str, float]
    of_projection: tuple[float, ...]
    of_mlp: tuple[float, ...]

    def layer_shape(self, index: int) -> LayerShape:
        """Each layer keeps keys and values, and a state."""
        hidden, space, usual = self.hidden_size, self.space, super().layer_shape(index)
        heads = self.heads(index)
        return replace(
            usual,
            cache=SeveralCaches((heads, space.state)),
            matrices=(
                *attention_matrices(hidden, heads), *space_matrices(space, hidden, "mamba"),
                *gated_matrices(hidden, self.intermediate_size, "feed_forward"),
            ),
            num_others=usual.num_others + space.num_others(hidden),
            split={**usual.split, "mamba_n_heads": space.num_heads},
        )  # fmt: skip


def read(file: Mapping[str, Any]) -> FalconH1Config:
    """All layers are alike. A norm of state spaces is optional."""
    fields = Fields(without_kinds(file), DEFAULTS, NO_WINDOW)
    check_activation(fields)
    _check_parts(fields)
    return FalconH1Config(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        space=_space(fields),
        factors={name: fields.number(f"{name}_multiplier") for name in SINGLE},
        of_projection=_list(fields, "ssm_multipliers", 5),
        of_mlp=_list(fields, "mlp_multipliers", 2),
    )


def _check_parts(fields: Fields) -> None:
    """Raise if fields that transformers does not read deny a layer one of its parts."""
    if fields.get("mamba_use_mlp") not in (None, True):
        raise ValueError(f"mamba_use_mlp must be true, got {shorten(fields['mamba_use_mlp'])}")
    listed, num_layers = fields.get("attn_layer_indices"), fields.size("num_hidden_layers")
    if listed is not None and ids("attn_layer_indices", listed) != {*range(num_layers)}:
        raise ValueError(
            f"attn_layer_indices must be null or have all {num_layers} layers, as each has"
            f" attention; got {shorten(listed)}"
        )


def _space(fields: Fields) -> StateSpace:
    inner = int(fields.number("mamba_expand") * fields["hidden_size"])
    if fields["mamba_d_ssm"] is not None:
        inner = fields.size("mamba_d_ssm")
    fields["mamba_d_head"] = head_size(fields, "mamba_d_head", "mamba_n_heads", inner)
    sizes, norm = space_sizes(fields, MAMBA_SIZES), None
    if sizes["num_heads"] * sizes["head_dim"] != inner:
        raise ValueError(
            f"mamba_n_heads={sizes['num_heads']} times mamba_d_head={sizes['head_dim']} must be"
            f" {inner}, the channels of a state space (mamba_d_ssm)"
        )
    if fields.flag("mamba_rms_norm"):
        norm = "gate last" if fields.flag("mamba_norm_before_gate") else "gate first"
    return StateSpace(
        **sizes,
        **time_limits(fields["time_step_limit"]),
        in_bias=fields.flag("mamba_proj_bias"),
        conv_bias=fields.flag("mamba_conv_bias"),
        out_bias=fields.flag("projectors_bias"),
        norm=norm,
    )


def _list(fields: Fields, name: str, length: int) -> tuple[float, ...]:
    """The factors of a list, or ones."""
    given = fields[name]
    if given is None:
        return (1.0,) * length
    if not isinstance(given, list) or len(given) != length:
        raise ValueError(f"{name} must be a list of {length} numbers, got {shorten(given)}")
    return tuple(check_float(name, value, 0.0, above=True) for value in given)


def build(config: FalconH1Config, make: "Build") -> "CausalLM":
    """Compose the model. The factor of keys is a factor of the scores of attention."""
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.scaled_mlp import ScaledMLP
    from nanovllm.layers.scaled_state_space import ScaledStateSpace
    from nanovllm.layers.side_by_side_block import Factors, SideBySideBlock
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    factors, hidden = config.factors, config.hidden_size
    (of_gate, of_output), outside = config.of_mlp, {"feed_forward_name": "feed_forward"}
    of_block = Factors(factors["attention_in"], factors["attention_out"], factors["ssm_out"])

    def block(index: int, make: "Build") -> "SideBySideBlock":
        scale = factors["key"] * config.head_dim**-0.5
        attention = parts.attention(config, index, make.inside("self_attn"), scale=scale)
        space = ScaledStateSpace(
            make.inside("mamba"), hidden, config.space, config.rms_norm_eps,
            config.of_projection, factors["ssm_in"],
        )  # fmt: skip
        mlp = ScaledMLP(
            make.inside("feed_forward"), hidden, config.intermediate_size, bias=config.mlp_bias,
            gate_factor=of_gate, out_factor=of_output,
        )  # fmt: skip
        norms = replace(
            parts.pre_norms(config), before_feed_forward=("pre_ff_layernorm", parts.norm(config))
        )
        return SideBySideBlock(make, norms, attention, space, mlp, factors=of_block, **outside)

    embedding = parts.embedding(config, make, factors["embedding"])
    blocks, ropes = parts.blocks(config, make, block), {ROPE: parts.rope(config, make)}
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    head = parts.head(config, make, embedding, scale=factors["lm_head"])
    return CausalLM(make, decoder, head)


FAMILY = Family(read, build, NAMES)
