"""Gemma 3, text only: 270M, 1B, and the text of larger models. Gemma 2 with a norm on each head,
without a cap on scores, and with windows in five of six layers, which have a rope of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.family import Family
from nanovllm.models.fields import Fields
from nanovllm.models.gemma2 import LOGIT_CAP, SCORE_CAP, SIZES, SandwichConfig, sandwich_fields
from nanovllm.models.window_pattern import FIXED, with_layer_types
from nanovllm.models.windows import FULL, LAYER_TYPES, SLIDING
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:  # they need PyTorch, which reading a config does not
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    **SIZES, "vocab_size": 262_208, "max_position_embeddings": 131_072, SCORE_CAP: None,
    LOGIT_CAP: None,
}  # fmt: skip
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(SandwichConfig):
    """`rope_parameters` are those of the layers without a window."""

    sliding_rope_parameters: Mapping[str, Any]

    @property
    def max_context(self) -> int:
        """The files' length includes the rope scaling."""
        return self.max_position_embeddings


def read(file: Mapping[str, Any]) -> Gemma3Config:
    """Without `layer_types`, every sixth layer, or as the files say, attends to all tokens."""
    file = with_layer_types(file, DEFAULTS, interval=6)
    full, sliding = (
        Fields(_with_rope_of(kind, file), {**DEFAULTS, "rope_theta": THETAS[kind]}, FIXED)
        for kind in LAYER_TYPES
    )
    if full[SCORE_CAP] is not None:  # transformers does not read it
        raise ValueError(f"{SCORE_CAP} must be null, got {shorten(full[SCORE_CAP])}")
    return Gemma3Config(
        **sandwich_fields(full),
        qk_norm=True,
        sliding_rope_parameters=sandwich_fields(sliding)["rope_parameters"],
    )


def _with_rope_of(kind: str, file: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the rope of one type of layers alone.

    `rope_parameters` have one for each type. In files of transformers 4, `rope_theta` and
    `rope_scaling` are for layers without a window, and `rope_local_base_freq` for the others.
    """
    given = file.get("rope_parameters")
    if given is not None and (not isinstance(given, dict) or given.keys() - {*LAYER_TYPES}):
        raise ValueError(
            f"rope_parameters must have the parameters of {' and '.join(LAYER_TYPES)} layers, got"
            f" {shorten(given)}"
        )
    names = ("rope_theta", "rope_scaling") if kind == FULL else ("rope_local_base_freq", "")
    own = zip(("rope_theta", "rope_scaling"), map(file.get, names), strict=True)
    others = {name: value for name, value in file.items() if not name.startswith("rope_")}
    rope = {name: value for name, value in own if value is not None}
    return {**others, **rope, "rope_parameters": given and given.get(kind)}


def build(config: Gemma3Config, make: "Build") -> "CausalLM":
    """Gemma 2 with a rope for each type of layers."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.rotary_embedding import get_rope
    from nanovllm.models import gemma_parts

    def block(index: int, make: "Build") -> Block:
        rope = FULL if config.sliding_windows[index] is None else SLIDING
        return gemma_parts.sandwich_block(
            config, index, make, rope=rope, query_scalar=config.query_scalar,
            soft_cap=config.score_cap,
        )  # fmt: skip

    limits = make.max_positions, config.max_position_embeddings
    both = zip(LAYER_TYPES, (config.rope_parameters, config.sliding_rope_parameters), strict=True)
    ropes = {kind: get_rope(config.head_dim, *limits, parameters) for kind, parameters in both}
    return gemma_parts.causal_lm(config, make, block, ropes, config.logit_cap)


FAMILY = Family(read, build)
