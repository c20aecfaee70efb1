"""StarCoder2: LayerNorms, a feed-forward part without a gate, and a window in all layers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.models.family import Family
from nanovllm.models.fields import EVERY_LAYER, Fields, decoder_fields
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.spellings import errors_spell, respelt

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288,
    "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
    "use_bias": True, "tie_word_embeddings": True, "eos_token_id": 50_256,
}  # fmt: skip
SPELLING = {"norm_epsilon": "rms_norm_eps"}
FIXED: Mapping[str, Any] = {"use_sliding_window": True, **EVERY_LAYER}
NAMES = Names(pieces={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> PlainConfig:
    """`use_bias` is for all linear layers but the head."""
    fields = Fields(respelt(file, SPELLING), respelt(DEFAULTS, SPELLING), FIXED)
    bias = fields.flag("use_bias")
    return PlainConfig(
        **decoder_fields(fields),
        activation=activation(fields),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_outside=fields["hidden_size"],
    )


def build(config: PlainConfig, make: "Build") -> "CausalLM":
    """Usual attention."""
    from nanovllm.models import plain_parts

    return plain_parts.build(config, make)


FAMILY = Family(read, build, NAMES)
