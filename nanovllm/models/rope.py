"""Read and check the rope parameters of a `config.json`, in old and new spellings.

It is loaded only for configs that have some. Plain data: no PyTorch. `layers/rope_types.py`
computes the frequencies.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.config import MAX_POSITIONS
from nanovllm.utils.checks import check_bool, check_float, shorten

SPELLINGS = ("rope_scaling", "rope_parameters")  # of transformers 4 and of transformers 5
TOP_LEVEL = ("rope_theta", "partial_rotary_factor")  # where transformers 4 has them
FIELDS = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor", "short_factor", "long_factor",
)  # fmt: skip
LISTS = ("short_factor", "long_factor")  # a factor for each rotated pair
NULLS = ("rope_type", "type", "truncate", "factor")  # where null does not mean absent
# The fields that each type needs, besides `rope_theta`.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": LISTS,
}  # fmt: skip
# The context length of the first training. For the types that need it, the top level of the config
# overrides `rope_parameters`.
TRAINED_LENGTH = "original_max_position_embeddings"
NEEDS_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


def rope_parameters(
    raw: Mapping[str, Any],
    file: Mapping[str, Any],
    head_dim: int,
    partial: bool,
    old_types: Mapping[str, str],
) -> dict[str, Any]:
    """The rope parameters of a config: the fields of its `file`, and `raw`, with the defaults.

    `rope_type` and `rope_theta` are always present. Spellings that differ are a ValueError, and so
    is a rotation of a part of each head, unless the family has `partial` ones. `old_types` are
    other names of rope types.
    """
    spelt = {name: _read(name, file, raw, old_types) for name in SPELLINGS}
    given = [name for name in SPELLINGS if file.get(name)] or SPELLINGS
    parameters = spelt[given[0]]
    if spelt[given[-1]] != parameters:
        both = " and ".join(f"{name}={shorten(file[name])}" for name in given)
        raise ValueError(f"{both} differ; keep one of them")
    parameters = {field: _checked(field, value) for field, value in parameters.items()}
    _settle_factor(parameters, raw["max_position_embeddings"])
    _check_rotated_part(parameters, raw["architectures"][0], partial, head_dim)
    return parameters


def max_rope_positions(parameters: Mapping[str, Any], max_position_embeddings: int) -> int:
    """The longest context that a model supports, including its rope scaling."""
    trained = parameters.get(TRAINED_LENGTH) or max_position_embeddings
    if parameters["rope_type"] in ("linear", "yarn"):
        return max(max_position_embeddings, int(trained * parameters["factor"]))
    return max_position_embeddings


def _read(
    spelling: str, file: Mapping[str, Any], raw: Mapping[str, Any], old_types: Mapping[str, str]
) -> dict[str, Any]:
    """The parameters in one spelling, completed from the top level of the config."""
    value = {} if file.get(spelling) is None else file[spelling]
    if not isinstance(value, dict):
        raise TypeError(f"{spelling} must be an object, got {shorten(value)}")
    if unknown := value.keys() - {*FIELDS, "type"}:
        raise ValueError(f"{spelling}: {shorten(sorted(unknown))} are not supported")
    parameters = {n: v for n, v in value.items() if v is not None or n in NULLS}
    for field in TOP_LEVEL:
        top = file.get(field)
        if top is not None and parameters.setdefault(field, top) != top:
            other = f"{shorten(parameters[field])} in {spelling}"
            raise ValueError(f"{field}={shorten(top)} and {other} differ; keep one of them")
    parameters.setdefault("rope_theta", raw["rope_theta"])
    rope_type = parameters["rope_type"] = _rope_type(parameters, old_types)
    if rope_type in NEEDS_TRAINED_LENGTH and raw.get(TRAINED_LENGTH) is not None:
        parameters[TRAINED_LENGTH] = raw[TRAINED_LENGTH]
    return parameters


def _rope_type(parameters: dict[str, Any], old_types: Mapping[str, str]) -> str:
    """The type by its present name. Removes `type`, the old name of the field."""
    old = parameters.pop("type", parameters.get("rope_type", "default"))
    names = [parameters.get("rope_type", old), old]
    names = [old_types.get(n, n) if isinstance(n, str) else n for n in names]
    if names[0] != names[1]:
        raise ValueError(f"rope_type {names[0]!r} and its old name type {names[1]!r} differ")
    if names[0] not in [*NEEDS]:
        known = ", ".join(NEEDS)
        raise ValueError(f"rope_type {shorten(names[0])} is not supported; {known} are")
    rope_type: str = names[0]
    return rope_type


def _checked(field: str, value: Any) -> Any:
    """The value to keep; a factor is checked by `_settle_factor`."""
    if field in ("rope_type", "factor"):
        return value
    if field == "truncate":
        return check_bool(field, value)
    if field == "rope_theta":
        return check_float(field, value, 1.0, above=True)
    if field == TRAINED_LENGTH:
        return check_float(field, value, 2.0, MAX_POSITIONS)
    if field not in LISTS:
        return check_float(field, value, 0.0)
    if not isinstance(value, list):
        raise TypeError(f"{field} must be a list of numbers, got {shorten(value)}")
    return [check_float(field, number, 0.0, above=True) for number in value]


def _settle_factor(parameters: dict[str, Any], max_positions: int) -> None:
    """Check the factors that the type needs. yarn's may be null: the lengths decide it."""
    rope_type, trained = parameters["rope_type"], parameters.get(TRAINED_LENGTH, max_positions)
    if "factor" in parameters and parameters["factor"] is None:
        del parameters["factor"]
        if rope_type == "yarn":
            parameters["factor"] = max_positions / trained
    if "factor" in parameters:
        if rope_type == "default":
            raise ValueError("rope_type 'default' takes no factor")
        longest = MAX_POSITIONS / trained
        parameters["factor"] = check_float("factor", parameters["factor"], 1.0, longest)
    for field in NEEDS[rope_type]:
        if field not in parameters:
            raise ValueError(f"rope_type {rope_type!r} needs a {field}")
    low, high = (parameters.get(f"{end}_freq_factor", 1.0) for end in ("low", "high"))
    if rope_type == "llama3" and not 0 < low < high:
        raise ValueError(f"low_freq_factor={low} must be above 0 and below high_freq_factor={high}")


def _check_rotated_part(
    parameters: Mapping[str, Any], name: str, partial: bool, head_dim: int
) -> None:
    """Check the rotated part of each head, and that longrope has a factor for each of its pairs."""
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not partial:
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
