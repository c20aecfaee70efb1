"""GPT-2, DistilGPT-2, Cerebras-GPT and others of its form: learned positions, transposed files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.formats.buffer_names import BufferNames
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.spellings import errors_spell, respelt

if TYPE_CHECKING:
    from nanovllm.layers.block import Block
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "eos_token_id": 50_256,
}  # fmt: skip
OWN = {"layer_norm_epsilon": "rms_norm_eps", "n_inner": "intermediate_size"}
BOTH = {
    "n_positions": "max_position_embeddings", "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
}  # fmt: skip
FIXED: Mapping[str, Any] = {"num_key_value_heads": None, "head_dim": None, **NO_WINDOW}
NAMES = BufferNames(
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    stores_fused=True,
    prefixes={"transformer.": "model.", "wpe.": "model.wpe."},
    pieces={
        "wte": "embed_tokens", "wpe": "embed_positions", "h": "layers", "ln_f": "norm",
        "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
    },
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GPT2Config(PlainConfig):
    """`scales` has the factor of each layer's scores; None: the usual one."""

    scales: tuple[float | None, ...]


@errors_spell({**OWN, **BOTH})
def read(file: Mapping[str, Any]) -> GPT2Config:
    """Without `n_inner`, feed-forward parts are four times as wide as hidden states."""
    defaults = respelt(respelt(DEFAULTS, OWN), BOTH)
    fields = Fields(respelt(respelt(file, OWN), BOTH, both=True), defaults, FIXED)
    hidden = fields.size("hidden_size")
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * hidden
    if fields.flag("add_cross_attention"):
        raise ValueError("add_cross_attention=True: attention to an encoder is not supported")
    common = decoder_fields(fields)
    return GPT2Config(
        **common | {"rotated_layers": (False,) * common["num_hidden_layers"]},
        activation=activation(fields, "activation_function"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_outside=hidden * (1 + common["max_position_embeddings"]),
        usual_order="usual_order" in file,
        scales=_scales(fields, common["head_dim"], common["num_hidden_layers"]),
    )


def _scales(fields: Fields, head_dim: int, num_layers: int) -> tuple[float | None, ...]:
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights") else 1.0
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        return tuple(scale / (index + 1) for index in range(num_layers))
    return (None if scale != 1.0 else scale,) * num_layers


def build(config: GPT2Config, make: "Build") -> "CausalLM":
    """Embeddings of tokens and positions are added; nothing is rotated."""
    from nanovllm.layers.activations import activation_of
    from nanovllm.layers.file_attention import TransposedAttention, TransposedMLP
    from nanovllm.layers.mixer import SelfAttention
    from nanovllm.layers.plain_mlp import PlainMLP
    from nanovllm.models import parts, plain_parts
    from nanovllm.models.decoder import CausalLM
    from nanovllm.models.learned_positions import PositionedDecoder, PositionTable

    def block(index: int, make: "Build") -> "Block":
        mixer = (SelfAttention if config.usual_order else TransposedAttention)(
            make.inside("self_attn"), config.hidden_size, config.heads(index), rope=None,
            qkv_bias=True, o_bias=True, scale=config.scales[index],
        )  # fmt: skip
        part = (PlainMLP if config.usual_order else TransposedMLP)(
            make.inside("mlp"), config.hidden_size, config.intermediate_size,
            activation_of(str(config.activation)), bias=True,
        )  # fmt: skip
        return plain_parts.block(config, make, mixer, part)

    decoder = PositionedDecoder(
        make,
        parts.embedding(config, make),
        PositionTable(config.max_position_embeddings, config.hidden_size),
        parts.blocks(config, make, block),
        plain_parts.norm(config),
    )
    return CausalLM(make, decoder, parts.head(config, make, decoder.embed_tokens))


FAMILY = Family(read, build, NAMES)
