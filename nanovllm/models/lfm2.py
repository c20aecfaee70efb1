"""LFM2, dense: gated short convolutions in most layers, attention with norms of heads in others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.layers.cache_spec import State, StateTensor
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import MAX_LAYERS, Fields, decoder_fields, ids
from nanovllm.models.layer_kinds import checked_kinds
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_bool, check_float, check_int, shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

SIZES: Mapping[str, Any] = {
    "vocab_size": 65_536, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 2, "conv_bias": False,
    "conv_L_cache": 3,
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    **SIZES, "hidden_size": 2560, "intermediate_size": 12_288, "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "full_attn_idxs": None,
}  # fmt: skip
SPELLING = {"norm_eps": "rms_norm_eps"}
# Other names of fields. If a file has both, transformers reads these.
OVERRIDES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
CONV = "conv"
NAMES = Names(
    pieces={
        "embedding_norm": "norm", "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "self_attn.out_proj": "self_attn.o_proj",
        "q_layernorm": "q_norm", "k_layernorm": "k_norm", "feed_forward": "mlp",
        "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """The layers that `convolves` have a convolution of `conv_width` tokens, others attention."""

    convolves: tuple[bool, ...]
    conv_width: int
    conv_bias: bool

    def layer_shape(self, index: int) -> LayerShape:
        shape, hidden, width = super().layer_shape(index), self.hidden_size, self.conv_width
        if not self.convolves[index]:
            return shape
        matrices = (
            MatrixShape("conv.in_proj", 3 * hidden, hidden),
            MatrixShape("conv.out_proj", hidden, hidden),
            *(each for each in shape.matrices if not each.name.startswith("self_attn.")),
        )
        # Filters and biases instead of the norms of heads.
        others = hidden * (width + 5 * self.conv_bias) - 2 * self.head_dim
        return replace(
            shape, cache=State((StateTensor((width - 1, hidden)),)), matrices=matrices,
            num_others=shape.num_others + others, split={**shape.split, "hidden_size": hidden},
        )  # fmt: skip


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> Lfm2Config:
    """Without `layer_types`, the layers of `full_attn_idxs` have attention, or all layers."""
    raw = {**DEFAULTS, **file}
    decoder = mixed_fields(file, DEFAULTS, kinds_of(raw))
    size = decoder["intermediate_size"]
    return Lfm2Config(**{**decoder, "intermediate_size": _inner_size(raw, size)})


def kinds_of(raw: Mapping[str, Any]) -> object:
    """The kind of each layer, by `layer_types` or by `full_attn_idxs`; they must agree."""
    given, listed = raw.get("layer_types"), raw.get("full_attn_idxs")
    if given is None:
        return _by_indices(raw, listed)
    if isinstance(given, list) and listed is not None and given != _by_indices(raw, listed):
        raise ValueError(f"full_attn_idxs={shorten(listed)} and layer_types differ; keep one")
    return given


def _by_indices(raw: Mapping[str, Any], listed: Any) -> list[str]:
    num_layers = check_int("num_hidden_layers", raw["num_hidden_layers"], 1, MAX_LAYERS)
    attending = range(num_layers) if listed is None else ids("full_attn_idxs", listed)
    if outside := [index for index in attending if index not in range(num_layers)]:
        raise ValueError(
            f"full_attn_idxs has {shorten(sorted(outside))}, but the layers are 0 to"
            f" {num_layers - 1} (num_hidden_layers={num_layers})"
        )
    return [FULL if index in attending else CONV for index in range(num_layers)]


def _inner_size(raw: Mapping[str, Any], size: int) -> int:
    """The intermediate size that the config's fields make of `size`."""
    if not check_bool("block_auto_adjust_ff_dim", raw["block_auto_adjust_ff_dim"]):
        return size
    size = int(2 * size / 3)
    factor = raw["block_ffn_dim_multiplier"]
    if factor is None:
        return size
    size = int(check_float("block_ffn_dim_multiplier", factor, 0.0, above=True) * size)
    multiple = check_int("block_multiple_of", raw["block_multiple_of"], 1)
    return -(-size // multiple) * multiple


def mixed_fields(
    file: Mapping[str, Any], defaults: Mapping[str, Any], kinds: object
) -> dict[str, Any]:
    """The fields of an `Lfm2Config` with layers of these `kinds`, or of one with experts."""
    others = {ours: file[name] for name, ours in OVERRIDES.items() if name in file}
    plain = {name: value for name, value in file.items() if name != "layer_types"} | others
    fields = Fields(respelt(plain, SPELLING), respelt(defaults, SPELLING))
    decoder = decoder_fields(fields)
    checked = checked_kinds("layer_types", kinds, (CONV, FULL), decoder["num_hidden_layers"])
    return dict(
        **decoder, qk_norm=True, convolves=tuple(kind == CONV for kind in checked),
        conv_width=check_int("conv_L_cache", fields["conv_L_cache"], 2),
        conv_bias=fields.flag("conv_bias"),
    )  # fmt: skip


def build(
    config: Any, make: "Build",
    feed_forward: "Callable[[int, Build], FeedForward] | None" = None,
) -> "CausalLM":  # fmt: skip
    """Compose the model, with gated feed-forward parts or, by a layer's index, with others."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.gated_conv import GatedConv
    from nanovllm.models import parts

    def block(index: int, make: "Build") -> Block:
        inside = make.inside("mlp")
        part = feed_forward(index, inside) if feed_forward else parts.mlp(config, inside)
        norms = parts.pre_norms(config)
        if not config.convolves[index]:
            return Block(
                make, norms, parts.attention(config, index, make.inside("self_attn")), part
            )
        conv = GatedConv(
            make.inside("conv"), config.hidden_size, config.conv_width, config.conv_bias
        )
        return Block(make, norms, conv, part, mixer_name="conv")

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build, NAMES)
