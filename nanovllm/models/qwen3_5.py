"""Qwen3.5, text only, dense: gated delta nets, attention with an output gate, norms by 1 + w."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.layers.delta_sizes import DeltaNames
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.hybrid import MIXER, HybridConfig, delta_net, hybrid_fields, layers_by_interval
from nanovllm.models.shapes import LayerShape
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

SIZES: Mapping[str, Any] = {
    "max_position_embeddings": 32_768, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
TENSORS = DeltaNames(
    {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"},
    norm="norm", out_proj="out_proj",
)  # fmt: skip
DRAFTS = "mtp."  # the layers that predict later tokens
NAMES = Names(fused={**FUSED, "in_proj": tuple(TENSORS.projections)}, skipped=(DRAFTS,))
WHOLE_NAMES = replace(  # of the files of a model that also sees
    NAMES, prefixes={"model.language_model.": "model."}, skipped=(DRAFTS, "model.visual.")
)
ROPES = ("rope_parameters", "rope_scaling")
# How positions in images are divided among the rotated elements. Those of text are equal.
OF_IMAGES = ("mrope_section", "mrope_interleaved")
ROTATED = "partial_rotary_factor"
INTERVAL = "full_attention_interval"


@dataclass(frozen=True, kw_only=True)
class GatedConfig(HybridConfig):
    """The query projection also computes gates."""

    delta_names = TENSORS

    def layer_shape(self, index: int) -> LayerShape:
        shape, heads = super().layer_shape(index), self.heads(index)
        if index in self.linear_layers:
            return shape
        q_proj, *others = shape.matrices
        gated = q_proj._replace(size_out=2 * q_proj.size_out)
        biases = heads.num_heads * heads.head_dim * self.qkv_bias
        return replace(shape, matrices=(gated, *others), num_others=shape.num_others + biases)


def read(file: Mapping[str, Any]) -> GatedConfig:
    """The config of a dense model.

    Positions of images have three dimensions, those of text one.
    """
    return GatedConfig(**gated_fields(file, DEFAULTS))


def gated_fields(file: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `GatedConfig`. A quarter of each head is rotated if the file says nothing."""
    ropes = {name: _rope(file[name]) for name in ROPES if file.get(name) is not None}
    if not any(ROTATED in fields for fields in (file, *ropes.values())):
        ropes[ROTATED] = 0.25
    fields = Fields({**file, **ropes}, defaults)
    check_activation(fields)
    if fields.get("attn_output_gate", True) is not True:
        raise ValueError(
            f"attn_output_gate must be true, got {shorten(fields['attn_output_gate'])}"
        )
    plain = Fields({**fields.file, "layer_types": None}, defaults, NO_WINDOW)
    bias = fields.flag("attention_bias")
    return dict(
        **decoder_fields(plain, partial_rotary=True), **_layers(fields),
        qk_norm=True, qkv_bias=bias, o_bias=bias,
    )  # fmt: skip


def _layers(fields: Fields) -> dict[str, Any]:
    """The fields of a `HybridConfig`; `full_attention_interval` and `layer_types` must agree."""
    interval = check_int(INTERVAL, fields.get(INTERVAL, 4), 1)
    hybrid, num_layers = hybrid_fields(fields, interval), fields["num_hidden_layers"]
    by_interval = layers_by_interval(num_layers, interval)
    if INTERVAL in fields.file and hybrid["linear_layers"] != by_interval:
        raise ValueError(f"{INTERVAL}={interval} contradicts layer_types; keep one of them")
    return hybrid


def _rope(given: Any) -> Any:
    """The parameters of a rope that text has."""
    if not isinstance(given, Mapping):
        return given  # an error later
    return {name: value for name, value in given.items() if name not in OF_IMAGES}


def build(
    config: GatedConfig, make: "Build",
    feed_forward: "Callable[[int, Build], FeedForward] | None" = None,
) -> "CausalLM":  # fmt: skip
    """Compose the model, with a dense or another feed-forward part."""
    from nanovllm.layers.block import Block, pre_norms
    from nanovllm.layers.gated_attention import GatedAttention
    from nanovllm.layers.mixer import ROPE
    from nanovllm.layers.plus_one_norm import PlusOneRMSNorm
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def norms(size: int, number: int = 2) -> list[PlusOneRMSNorm]:
        return [PlusOneRMSNorm(size, config.rms_norm_eps) for _ in range(number)]

    def block(index: int, make: "Build") -> Block:
        inside = make.inside("mlp")
        part = feed_forward(index, inside) if feed_forward else parts.mlp(config, inside)
        around = pre_norms(*norms(config.hidden_size))
        if index in config.linear_layers:
            return Block(make, around, delta_net(config, make), part, mixer_name=MIXER)
        attention = parts.attention(
            config, index, make.inside("self_attn"), GatedAttention,
            head_norms=tuple(norms(config.head_dim)),
        )  # fmt: skip
        return Block(make, around, attention, part)

    embedding = parts.embedding(config, make)
    (last_norm,) = norms(config.hidden_size, 1)
    blocks, ropes = parts.blocks(config, make, block), {ROPE: parts.rope(config, make)}
    decoder = Decoder(make, embedding, blocks, last_norm, ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


def draft_layer(config: GatedConfig) -> GatedConfig:
    """With attention in layer 0, as in the draft head."""
    return replace(config, linear_layers=frozenset())


FAMILY = Family(read, build, NAMES, draft_layer)
