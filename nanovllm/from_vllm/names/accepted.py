"""Values of vLLM's options that mean what is done here anyway, and more than a few of them do."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.other_names import Values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _has_no_items(value: Any) -> bool:
    """Whether a dict by kinds of input allows none: `{"image": 0}` or `{"image": {"count": 0}}`."""
    if not isinstance(value, Mapping):
        return False
    counts = [one.get("count") if isinstance(one, Mapping) else one for one in value.values()]
    return all(type(count) is int and count == 0 for count in counts)


def _is_guidance(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (name == "backend" and one in ("auto", "guidance")) or one is False or one is None
        for name, one in value.items()
    )


LIMIT = Values("any limit", lambda value: type(value) is int and value >= -1, 20)
SIZE = Values("any size", _is_number, 4)
NO_ITEMS = Values('dicts such as `{"image": 0}`', _has_no_items, {"image": {"count": 0}})
GUIDANCE = Values('dicts such as `{"backend": "auto"}`', _is_guidance, {"backend": "guidance"})
OF_N = Values("the value of `n`", lambda value: type(value) is int and value == 1, 1, "n")
