"""StableLM 3B, Zephyr, StableLM 2: Llama with LayerNorms, and partly rotated heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.plain import PlainConfig
from nanovllm.models.shapes import LayerShape
from nanovllm.models.spellings import errors_spell, partly_rotated, respelt

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "use_qkv_bias": False,
    "qk_layernorm": False, "use_parallel_residual": False, "eos_token_id": 0,
}  # fmt: skip
SPELLING = {"layer_norm_eps": "rms_norm_eps"}
FIXED: Mapping[str, Any] = {"head_dim": None, **NO_WINDOW}
NAMES = Names(pieces={"q_layernorm": "q_norm", "k_layernorm": "k_norm"})


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(PlainConfig):
    """With `norms_heads`, each query head and each key head has a LayerNorm without a bias."""

    norms_heads: bool

    def layer_shape(self, index: int) -> LayerShape:
        shape, heads = super().layer_shape(index), self.heads(index)
        normed = (heads.num_heads + heads.num_kv_heads) * heads.head_dim * self.norms_heads
        return replace(shape, num_others=shape.num_others + normed)


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> StableLmConfig:
    """Without another part in the file, a quarter of each head is rotated."""
    file = partly_rotated(respelt(file, SPELLING), 0.25)
    fields = Fields(file, respelt(DEFAULTS, SPELLING), FIXED)
    check_activation(fields)
    return StableLmConfig(
        **decoder_fields(fields, partial_rotary=True),
        activation=None,
        parallel=fields.flag("use_parallel_residual"),
        own_norm=False,
        qkv_bias=fields.flag("use_qkv_bias"),
        num_outside=fields["hidden_size"],
        norms_heads=fields.flag("qk_layernorm"),
    )


def build(config: StableLmConfig, make: "Build") -> "CausalLM":
    """The norms of heads are before the rotation."""
    from nanovllm.layers.head_layer_norm import head_layer_norms
    from nanovllm.layers.mixer import SelfAttention
    from nanovllm.models import plain_parts

    def attention(_: PlainConfig, index: int, make: "Build") -> "Mixer":
        heads, norms = config.heads(index), None
        if config.norms_heads:
            norms = head_layer_norms(heads, config.rms_norm_eps, make.ranks)
        return SelfAttention(
            make, config.hidden_size, heads, qkv_bias=config.qkv_bias, head_norms=norms
        )

    return plain_parts.build(config, make, attention)


FAMILY = Family(read, build, NAMES)
