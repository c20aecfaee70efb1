"""Checks of the fields of a `quantization_config`, and rules for layers, for all its readers.

Each check raises an error that names the field.
"""

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.formats.names import HEAD
from nanovllm.formats.quantization import SchemeRule
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import check_int, shorten


def refusal(name: str, value: Any, supported: Any) -> ValueError:
    """The error of a value that is not supported, which names those that are."""
    return ValueError(
        f"{name}={shorten(value)} is not supported; supported: {', '.join(map(repr, supported))}"
    )


def check_only(config: Mapping[str, Any], name: str, *supported: Any) -> None:
    """Raise unless a field, if it is there, has one of these values: 4.0 is not 4."""
    value = config.get(name, supported[0])
    if not any(type(value) is type(other) and value == other for other in supported):
        raise refusal(name, value, supported)


def check_object(name: str, value: Any) -> Mapping[str, Any]:
    """Raise unless it is an object of JSON."""
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object, got {shorten(value)}")
    return value


def names_in(config: Mapping[str, Any], *fields: str) -> list[str]:
    """The names in those of these fields that are there and not null."""
    there = [field for field in fields if config.get(field) is not None]
    return [name for field in there for name in check_names(field, config[field])]


def check_names(field: str, value: Any) -> list[str]:
    """Raise unless it is a list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field} must be a list of names, got {shorten(value)}")
    return value


def check_kv_cache(config: Mapping[str, Any]) -> None:
    """Raise unless `kv_cache_scheme`, if it is there, is for scales of keys and values in FP8."""
    if config.get("kv_cache_scheme") is not None:
        kv_cache = check_object("kv_cache_scheme", config["kv_cache_scheme"])
        if (kv_cache.get("num_bits"), kv_cache.get("type")) != (8, "float"):
            raise refusal("kv_cache_scheme", kv_cache, ["8-bit float"])


def check_block(field: str, value: Any) -> tuple[int, int]:
    """The rows and columns of a block: a list of two numbers, or a text like "128x128"."""
    sizes = value
    if isinstance(value, str):
        sizes = [int(size) if size.isdecimal() else size for size in value.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise ValueError(f"{field} must have 2 sizes, got {shorten(value)}")
    rows, columns = (check_int(f"{field}: size of a block", size, 16) for size in sizes)
    return rows, columns


def rule(field: str, pattern: str, scheme: Scheme | None) -> SchemeRule:
    """A rule with a pattern of a field."""
    try:
        return SchemeRule(re.compile(pattern), scheme)
    except re.error as error:
        raise ValueError(
            f"{field} must have regular expressions, got {shorten(pattern)}: {error}"
        ) from None


def excluding(names: list[str], scheme: Scheme, head: bool = False) -> tuple[SchemeRule, ...]:
    """The scheme for all layers, except those with one of `names` in their own names.

    Names match as whole words, which dots separate. The head is plain unless it is included.
    """
    excluded = [rf"(.*\.)?{any_of(names)}(\.|$)"] if names else []
    if not head:
        excluded.append(f"{HEAD}$")
    rules = [SchemeRule(re.compile(pattern), None) for pattern in excluded]
    return (*rules, SchemeRule(re.compile(""), scheme))


def any_of(names: list[str]) -> str:
    """A pattern for all of these names: it takes as long as one for a single name."""
    return f"(?:{'|'.join(map(re.escape, names))})"


def group_size(config: Mapping[str, Any]) -> int | None:
    """The inputs that share a scale; None for all of a row."""
    size = config["group_size"]
    return None if size == -1 else check_int("group_size", size, 8)
