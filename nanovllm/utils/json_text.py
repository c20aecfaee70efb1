"""Parse JSON that users write, and refuse duplicate names, which a parser would ignore."""

import json
from collections import Counter
from typing import Any

from nanovllm.utils.checks import ShortRepr, shorten


class _JSONRepr(ShortRepr):
    """Writes the types that JSON's parser returns."""

    def repr_str(self, x: str, _: int) -> str:
        half = self.maxstring // 2
        shown = x if len(x) <= self.maxstring else f"{x[:half]}...{x[-half:]}"
        text = json.dumps(shown, ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode()  # unpaired surrogates

    def repr_bool(self, x: bool, _: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, *_: Any) -> str:  # noqa: N802
        return "null"


_json_repr = _JSONRepr()
_json_repr.maxother = _json_repr.maxstring = 100
shorten_json = _json_repr.repr  # as `checks.shorten`, but shows a value as JSON


def parse_json(text: str) -> Any:
    """Parse JSON; invalid text, or a name that occurs twice in an object, is a ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that starts at `start`; return it and its end."""
    try:
        return json.JSONDecoder(object_pairs_hook=_object).raw_decode(text, start)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of these pairs; raises for equal names, as JSON's parser would keep the last one."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shorten(name)} occurs twice")
    return value


def check_json_bool(name: str, value: Any) -> bool:
    """Return a value of JSON if it is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {shorten_json(value)}")
    return value
