"""A rope for each type of layers: those with a window, and those without one.

Files have `rope_parameters` with those of each type.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.models.config import ModelConfig
from nanovllm.models.rope import rope_parameters
from nanovllm.models.windows import FULL, LAYER_TYPES, SLIDING
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.rotary_embedding import RotaryEmbedding

Parameters = Mapping[str, Any]
PART = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class KindRopesConfig(ModelConfig):
    """`rope_parameters` are those of layers without a window."""

    sliding_rope_parameters: Parameters

    def kind(self, index: int) -> str:
        """The type of a layer, which is the name of its rope, too."""
        return FULL if self.sliding_windows[index] is None else SLIDING


def without_ropes(file: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file, without those of ropes."""
    return {
        name: value for name, value in file.items() if not name.startswith("rope_") and name != PART
    }


def kind_ropes(
    file: Mapping[str, Any],
    raw: Mapping[str, Any],
    head_dim: int,
    kinds: Collection[str],
    defaults: Mapping[str, Parameters],
    part: float,
) -> dict[str, Parameters]:
    """The fields of the ropes. Of types that are not among `kinds`, a file may have none.

    `defaults` has the parameters of each type for files without `rope_parameters`; in files with
    them, a rope without `partial_rotary_factor` rotates the `part` of each head. `raw` has the
    file's other fields, with defaults.
    """
    given, old, top = (file.get(name) for name in ("rope_parameters", "rope_scaling", PART))
    if old is not None and not _is_default(old):
        raise ValueError(f"rope_scaling must be null, got {shorten(old)}; use rope_parameters")
    given = defaults if given is None else given
    if not isinstance(given, Mapping) or given.keys() - {*LAYER_TYPES}:
        raise ValueError(
            f"rope_parameters must have the parameters of {' and '.join(LAYER_TYPES)} layers, got"
            f" {shorten(given)}"
        )
    found = {kind: _of_kind(raw, head_dim, kind, given.get(kind), part) for kind in kinds}
    if top is not None and all(top != rope[PART] for rope in found.values()):
        raise ValueError(f"{PART}={shorten(top)} is that of no rope in rope_parameters")
    full, sliding = (found.get(kind, next(iter(found.values()))) for kind in LAYER_TYPES)
    return dict(rope_parameters=full, sliding_rope_parameters=sliding)


def _is_default(old: object) -> bool:
    """Whether a `rope_scaling` says no more than the default type."""
    return isinstance(old, Mapping) and all(
        name in ("type", "rope_type") and value == "default" for name, value in old.items()
    )


def _of_kind(
    raw: Mapping[str, Any], head_dim: int, kind: str, own: object, part: float
) -> dict[str, Any]:
    """The parameters of one rope, checked."""
    if not isinstance(own, Mapping) or "rope_theta" not in own:
        raise ValueError(f"rope_parameters of {kind} must have a rope_theta, got {shorten(own)}")
    own = {**own, PART: part} if own.get(PART) is None else {**own}
    try:
        return rope_parameters(raw, {"rope_parameters": own}, head_dim, True, {})
    except (TypeError, ValueError) as error:
        raise type(error)(f"rope_parameters of {kind}: {error}") from None


def ropes_of(config: KindRopesConfig, make: "Build") -> "dict[str, RotaryEmbedding]":
    """The ropes of a decoder by their names."""
    from nanovllm.layers.rotary_embedding import get_rope

    limits = make.max_positions, config.max_position_embeddings
    both = zip(LAYER_TYPES, (config.rope_parameters, config.sliding_rope_parameters), strict=True)
    used = {config.kind(index) for index in range(config.num_hidden_layers)}
    return {
        kind: get_rope(config.head_dim, *limits, parameters)
        for kind, parameters in both
        if kind in used
    }
