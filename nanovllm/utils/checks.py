"""Checks of values that users pass: every error names the field, the range and the value."""

import math
import numbers
from collections.abc import Collection, Iterable
from typing import Any


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int if it is one (numpy's count, bools do not) in `[low, high]`."""
    bounds = f">= {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int {bounds}, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return number


def check_float(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return `value` as a float if it is a finite real number in `[low, high]`."""
    bounds = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {bounds}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise ValueError(f"{name} must be finite and {bounds}, got {value}")
    return number


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def as_list(name: str, value: Any) -> list[Any]:
    """List the items of any list-like `value`; NumPy and PyTorch arrays count, text does not."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict | set):
        raise TypeError(f"{name} must be a str or a list of token ids, got {value!r}")
    return list(value)
