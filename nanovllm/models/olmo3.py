"""OLMo 3: OLMo 2 with windows in most layers, which have a rope of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, check_activation, decoder_fields
from nanovllm.models.olmo2 import DEFAULTS as OLMO2
from nanovllm.models.olmo2 import Olmo2Config, block
from nanovllm.models.window_pattern import FIXED, with_layer_types
from nanovllm.models.windows import FULL, LAYER_TYPES, SLIDING
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {**OLMO2, "sliding_window": 4096}
THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """`rope_parameters` are those of the layers without a window."""

    sliding_rope_parameters: Mapping[str, Any]


def read(file: Mapping[str, Any]) -> Olmo3Config:
    """Without `layer_types`, every fourth layer attends to all tokens, and others to a window."""
    file, defaults = with_layer_types(file, DEFAULTS), {**DEFAULTS, "rope_theta": THETA}
    full, sliding = (
        Fields({**file, **_rope_of(kind, file)}, defaults, FIXED) for kind in LAYER_TYPES
    )
    check_activation(full)
    bias = full.flag("attention_bias")
    return Olmo3Config(
        **decoder_fields(full),
        qkv_bias=bias,
        o_bias=bias,
        sliding_rope_parameters=decoder_fields(sliding)["rope_parameters"],
    )


def _rope_of(kind: str, file: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the rope in layers of a kind. `rope_scaling` is for those without a window."""
    given = file.get("rope_parameters")
    if given is not None and (not isinstance(given, dict) or given.keys() - {*LAYER_TYPES}):
        raise ValueError(
            f"rope_parameters must have the parameters of {' and '.join(LAYER_TYPES)} layers, got"
            f" {shorten(given)}"
        )
    if given is None and file.get("rope_theta") not in (None, THETA):
        # transformers rotates layers with a window by its default then.
        raise ValueError(
            f"rope_theta={shorten(file['rope_theta'])} is for layers without a window alone; give"
            f" rope_parameters of {FULL} and of {SLIDING}"
        )
    others = {"rope_scaling": file.get("rope_scaling") if kind == FULL else None}
    return others | {"rope_parameters": given and given.get(kind)}


def build(config: Olmo3Config, make: "Build") -> "CausalLM":
    """OLMo 2 with two ropes."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.rotary_embedding import get_rope
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def layer(index: int, make: "Build") -> Block:
        rope = FULL if config.sliding_windows[index] is None else SLIDING
        return block(config, index, make, rope=rope)

    ropes = {
        kind: get_rope(
            config.head_dim, make.max_positions, config.max_position_embeddings, parameters
        )
        for kind, parameters in (
            (FULL, config.rope_parameters),
            (SLIDING, config.sliding_rope_parameters),
        )
    }
    embedding = parts.embedding(config, make)
    blocks = parts.blocks(config, make, layer)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build)
