"""Rope parameters of a `config.json`: old and new spellings merged, every value checked.

Plain data: no PyTorch. `layers/rotary_embedding.py` computes the frequencies.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.registry import Architecture
from nanovllm.utils.checks import check_float

FIELDS = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor", "short_factor", "long_factor",
)  # fmt: skip
LISTS = ("short_factor", "long_factor")  # a factor for each rotated pair
# The context length of the first training. For the types that need it, the top level of the config
# overrides `rope_parameters`.
TRAINED_LENGTH = "original_max_position_embeddings"
NEEDS_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


def rope_parameters(
    raw: Mapping[str, Any], name: str, architecture: Architecture, head_dim: int
) -> dict[str, Any]:
    """The rope parameters of the config `raw` of the architecture `name`.

    `rope_type` and `rope_theta` are always present.
    """
    parameters = _merge_spellings(raw)
    rope_type = _rope_type(parameters, architecture)
    parameters["rope_type"] = rope_type
    if rope_type in NEEDS_TRAINED_LENGTH and raw.get(TRAINED_LENGTH) is not None:
        parameters[TRAINED_LENGTH] = raw[TRAINED_LENGTH]
    if "rope_theta" not in parameters:
        raise KeyError("rope_theta")
    if rope_type != "longrope" and (rope_type == "default") == ("factor" in parameters):
        needs = "takes no" if rope_type == "default" else "needs a"
        raise ValueError(f"rope_type {rope_type!r} {needs} factor")
    for field, value in parameters.items():
        _check_value(field, value)
    _check_rotated_part(parameters, name, architecture, head_dim)
    return parameters


def _merge_spellings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge transformers 5's `rope_parameters` with 4's `rope_scaling` and top-level fields.

    Nulls count as absent, except a `rope_type` of null, which is no type that we support.
    """
    top_level = ("rope_theta", "partial_rotary_factor")
    parameters = {field: raw[field] for field in top_level if raw.get(field) is not None}
    for spelling in ("rope_scaling", "rope_parameters"):
        value = raw.get(spelling) or {}
        if not isinstance(value, dict):
            raise TypeError(f"{spelling} must be an object, got {value!r}")
        parameters |= {n: v for n, v in value.items() if v is not None or n == "rope_type"}
    return parameters


def _rope_type(parameters: dict[str, Any], architecture: Architecture) -> str:
    """The type by its present name. Removes `type`, the old name of the field."""
    legacy_type = parameters.pop("type", None)
    rope_type = parameters.get("rope_type", legacy_type or "default")
    if legacy_type not in (None, rope_type):
        raise ValueError(f"rope_type {rope_type!r} and its old name {legacy_type!r} disagree")
    renamed: str = architecture.rope_types.get(rope_type, rope_type)
    return renamed


def _check_value(field: str, value: Any) -> None:
    if field not in FIELDS:
        raise ValueError(f"rope parameter {field!r} is not supported")
    if field in ("rope_type", "truncate"):
        return
    if field not in LISTS:
        check_float(field, value, 1.0 if field in ("rope_theta", "factor") else 0.0)
    elif not isinstance(value, list):
        raise TypeError(f"{field} must be a list of numbers, got {value!r}")
    else:
        for number in value:
            check_float(field, number, 0.0, above=True)


def _check_rotated_part(
    parameters: Mapping[str, Any], name: str, architecture: Architecture, head_dim: int
) -> None:
    """Check the rotated part of each head, and that longrope has a factor for each of its pairs."""
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not architecture.partial_rotary:
        raise ValueError(f"partial_rotary_factor={part}: {name} rotates whole heads")
    rotated = int(head_dim * part)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor={part} of head_dim={head_dim} is {rotated}, which must be an"
            f" even number in [2, {head_dim}]"
        )
    for field in LISTS:
        if field in parameters and len(parameters[field]) != rotated // 2:
            raise ValueError(
                f"{field} must have {rotated // 2} numbers, got {len(parameters[field])}"
            )
