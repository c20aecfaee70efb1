"""Checks of values that users pass: every error gives the name, the allowed range and the value."""

import math
import numbers
import reprlib
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

# Types that can be iterated over, but are not lists of token ids.
NOT_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)


class ShortRepr(reprlib.Repr):
    """Shows the first items of a long value, and does not sort all names of a dict."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(i for i, _ in zip(x.items(), range(9), strict=False)), level)


_repr = ShortRepr()
_repr.maxother = _repr.maxstring = 100
shorten = _repr.repr  # an error shows the first items of a long value, not all of them


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint to append to an error: the known name that is likely meant, or ""."""
    from nanovllm.utils.hints import likely_name

    near = likely_name(name, known)
    return f"; did you mean {near!r}?" if near else ""


def allowed_range(low: float, high: float | None, above: bool = False) -> str:
    """A range in words that complete "must be"; `above` excludes `low` itself."""
    if high is None or high == math.inf:
        return f"{'>' if above else '>='} {low}"
    return f"in {'(' if above else '['}{low}, {high}]"


def allowed_choices(choices: Collection[str]) -> str:
    """Choices in words that complete "must be"."""
    return "one of " * (len(choices) > 1) + ", ".join(map(repr, choices))


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int if it is one (NumPy's are, bools are not) in `[low, high]`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int {allowed_range(low, high)}, got {shorten(value)}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed_range(low, high)}, got {shorten(value)}")
    return number


def check_float(
    name: str, value: Any, low: float, high: float = math.inf, above: bool = False
) -> float:
    """Return `value` as a float if it is a finite real number in `[low, high]`.

    `above` excludes `low` itself.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        allowed = allowed_range(low, high, above)
        raise TypeError(f"{name} must be a number {allowed}, got {shorten(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        allowed = allowed_range(low, high, above)
        raise ValueError(f"{name} must be finite and {allowed}, got {shorten(value)}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shorten(value)}")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {allowed_choices(choices)}, got {shorten(value)}{hint}")
    return str(value)


def check_name(name: str, known: Collection[str], place: str = "") -> None:
    """Raise unless `name` is one of the `known` fields of the object at `place`."""
    if name not in known:
        raise ValueError(f"{place}unknown field {shorten(name)}{did_you_mean(name, known)}")


def check_text(name: str, text: str) -> None:
    """Raise if `text` has an unpaired surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text: {error}") from None


def as_list(name: str, value: Any, kind: str = "a str or a list of token ids") -> list[Any]:
    """List the items of any list-like `value`: NumPy and PyTorch arrays are, text is not."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, NOT_LISTS):
        raise TypeError(f"{name} must be {kind}, got {shorten(value)}")
    return list(value)
