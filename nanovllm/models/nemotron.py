"""Nemotron 3 and 4, Minitron: LayerNorms with factors 1 + weight, and the square of relu."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, decoder_fields
from nanovllm.models.plain import PlainConfig, activation
from nanovllm.models.spellings import errors_spell, partly_rotated, respelt

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576,
    "num_hidden_layers": 32, "num_attention_heads": 48, "hidden_act": "relu2",
    "max_position_embeddings": 4096, "norm_eps": 1e-5, "eos_token_id": 3,
}  # fmt: skip
SPELLING = {"norm_eps": "rms_norm_eps"}


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> PlainConfig:
    """Without another part in the file, half of each head is rotated."""
    file = partly_rotated(respelt(file, SPELLING), 0.5)
    fields = Fields(file, respelt(DEFAULTS, SPELLING), NO_WINDOW)
    return PlainConfig(
        **decoder_fields(fields, partial_rotary=True),
        activation=activation(fields),
        norm="layer plus one",
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        num_outside=fields["hidden_size"],
    )


def build(config: PlainConfig, make: "Build") -> "CausalLM":
    """Usual attention."""
    from nanovllm.models import plain_parts

    return plain_parts.build(config, make)


FAMILY = Family(read, build)
