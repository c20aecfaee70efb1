"""The kinds of layers of hybrid models: with states, attention, feed-forward parts alone."""

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm.models.windows import FULL
from nanovllm.utils.checks import shorten

LINEAR = "linear_attention"  # as transformers names layers with states
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
NAMES = "layer_types", "layers_block_type"


def layer_kinds(
    file: Mapping[str, Any], allowed: Collection[str], num_layers: int | None = None
) -> tuple[str, ...] | None:
    """The kind of each layer, one of `allowed`; None if the file does not say it.

    There must be `num_layers` of them. Old files have other words and another name of the field.
    """
    given = {name: file[name] for name in NAMES if file.get(name) is not None}
    if not given:
        return None
    name, kinds = next(iter(given.items()))
    if any(other != kinds for other in given.values()):
        raise ValueError(f"{' and '.join(given)} differ; keep one of them")
    if isinstance(kinds, list):
        kinds = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return checked_kinds(name, kinds, allowed, num_layers)


def checked_kinds(
    name: str, kinds: object, allowed: Collection[str], num_layers: int | None
) -> tuple[str, ...]:
    """The `kinds` of the field `name`, which must be a list of `allowed` ones, one for a layer."""
    if not isinstance(kinds, list):
        raise TypeError(f"{name} must be a list, got {shorten(kinds)}")
    if unknown := [kind for kind in kinds if kind not in allowed]:
        raise ValueError(f"{name} {shorten(unknown)} are not supported; {', '.join(allowed)} are")
    if num_layers is not None and len(kinds) != num_layers:
        raise ValueError(f"{name} has {len(kinds)} entries, num_hidden_layers={num_layers}")
    return tuple(kinds)


def without_kinds(file: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file without the kinds of layers."""
    return {name: value for name, value in file.items() if name not in NAMES}
