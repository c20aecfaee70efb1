"""The JSON of a whole answer, made in steps: one with log-probabilities may have many megabytes."""

from collections.abc import Mapping
from typing import Any

import orjson

from nanovllm.utils.slices import Steps

AT_ONCE = 16  # items of a list that have items themselves
NUMBERS_AT_ONCE = 4096  # other items of a list
WRITTEN = 1000  # bytes in the time of one unit of work


def packed(value: Any) -> orjson.Fragment:
    """A part of an answer as JSON: one object in the place of many."""
    return orjson.Fragment(orjson.dumps(value))


def answer_json(body: Mapping[str, Any]) -> Steps[bytes]:
    """The JSON of an answer with `choices`, the same as if it were made at once.

    The log-probabilities of its tokens are `packed`.
    """
    if len(body["choices"]) == 1 and body["usage"]["total_tokens"] <= NUMBERS_AT_ONCE:
        return orjson.dumps(body)
    choices = []
    for choice in body["choices"]:
        written = orjson.dumps((yield from _written(choice)))
        choices.append(orjson.Fragment(written))
        yield 1
    others = {name: value for name, value in body.items() if name != "choices"}
    copied = {**body, **(yield from _written(others)), "choices": choices}
    return orjson.dumps(copied)


def _written(value: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """A copy of an object with its lists, and those of the objects in it, as JSON."""
    copied = dict(value)
    for name, item in value.items():
        if isinstance(item, list):
            copied[name] = yield from _list(item)
        elif isinstance(item, dict):
            copied[name] = yield from _written(item)
        elif isinstance(item, str):
            yield len(item) // WRITTEN
    return copied


def _list(items: list[Any]) -> Steps[Any]:
    """A list as JSON; a short one is left as it is."""
    deep = any(isinstance(item, dict | list) for item in items[:2])
    most = AT_ONCE if deep else NUMBERS_AT_ONCE
    if len(items) <= most:
        return items
    parts = []
    for start in range(0, len(items), most):
        parts.append(orjson.dumps(items[start : start + most])[1:-1])
        yield len(parts[-1]) // WRITTEN
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")
