"""JSON that users write: what a parser would pass over in silence is refused."""

import json
from collections import Counter
from typing import Any

from nanovllm.utils.checks import shorten


def parse_json(text: str) -> Any:
    """Parse JSON; invalid text, or a name that occurs twice in an object, is a ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that starts there; returns it, and where it ends."""
    try:
        return json.JSONDecoder(object_pairs_hook=_object).raw_decode(text, start)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse equal names, of which JSON's parser would silently keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shorten(name)} occurs twice")
    return value
