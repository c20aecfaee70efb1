"""Read the rope parameters of models whose layers of each type have ropes of their own."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import check_float, shorten

TYPES = ("default", "proportional")
FIELDS = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")


def typed_ropes(
    given: object, defaults: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The parameters for each of `kinds`, the types of layers, with the sizes of their heads.

    `given` is the field `rope_parameters`; None means the `defaults`.
    """
    ropes = defaults if given is None else given
    if not isinstance(ropes, Mapping):
        raise TypeError(f"rope_parameters must be an object, got {shorten(ropes)}")
    if missing := [kind for kind in kinds if not isinstance(ropes.get(kind), Mapping)]:
        raise ValueError(f"rope_parameters must have those of {missing[0]}, got {shorten(ropes)}")
    return {kind: _checked(kind, ropes[kind], head_dim) for kind, head_dim in kinds.items()}


def _checked(kind: str, given: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters of one rope, complete."""
    where = f"rope_parameters of {kind}"
    found = {name: value for name, value in given.items() if value is not None}
    rope_type = found.setdefault("rope_type", "default")
    if rope_type not in TYPES:
        known = ", ".join(TYPES)
        raise ValueError(f"{where}: rope_type {shorten(rope_type)} is not supported; {known} are")
    allowed = FIELDS if rope_type == "proportional" else FIELDS[:2]
    if unknown := found.keys() - {*allowed}:
        raise ValueError(f"{where}: {shorten(sorted(unknown))} are not supported")
    if "rope_theta" not in found:
        raise ValueError(f"{where}: rope_theta is missing")
    check_float(f"{where}: rope_theta", found["rope_theta"], 1.0, above=True)
    check_float(f"{where}: factor", found.get("factor", 1.0), 1.0)
    share = check_float("partial_rotary_factor", found.get("partial_rotary_factor", 1.0), 0.0, 1.0)
    if not int(share * head_dim // 2):
        raise ValueError(f"{where}: partial_rotary_factor={share} rotates nothing of {head_dim}")
    return found
