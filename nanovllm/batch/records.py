"""The records of a batch's output: OpenAI's batch output, a line of JSON for each request.

A record's `id` has the number of the input's line. A restarted job reads from it which lines are
done.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

ID = "batch_req_"
NUMBERED = re.compile(f"{ID}([1-9][0-9]{{0,9}})")  # limited: a journal has 8 bytes for each line
FIELDS = ("id", "custom_id", "response", "error")
FIELD = re.compile(rf'\s*"({"|".join(FIELDS)})"\s*:\s*')


class JournalRecord(NamedTuple):
    """What a job reads of a record: the input's line, its request's id, and whether it failed."""

    line: int
    custom_id: str
    failed: bool


def result_record(number: int, custom_id: str, body: Mapping[str, Any]) -> bytes:
    """The record of a line that was answered with `body`."""
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return _record(number, custom_id, response, None)


def error_record(number: int, custom_id: str, message: str) -> bytes:
    """The record of a line that cannot be answered."""
    error = {"code": "invalid_request", "message": f"line {number}: {message}", "line": number}
    return _record(number, custom_id, None, error)


def _record(number: int, custom_id: str, response: Any, error: Any) -> bytes:
    record = dict(id=f"{ID}{number}", custom_id=custom_id, response=response, error=error)
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record))
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    """A JSON value with null for numbers that are not finite, as the server writes them."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_record(data: bytes) -> JournalRecord | None:
    """Read a record in any spacing and order of its fields; None if `data` is something else."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not fields.keys() >= set(FIELDS):
        return None
    if not all(_may_be(name, fields[name]) for name in FIELDS):
        return None
    failed = fields["error"] is not None
    if failed == (fields["response"] is not None):
        return None
    return JournalRecord(int(fields["id"].removeprefix(ID)), fields["custom_id"], failed)


def begins_a_record(data: bytes, names: tuple[str, ...] = FIELDS) -> bool:
    """Whether `data` may be a record that lacks its end; its first field is one of `names`.

    Fields may have any spacing and order. A whole JSON object is not such a beginning.
    """
    text = data.decode(errors="ignore").lstrip("\ufeff \t\r")
    if not text.startswith("{"):
        return not text
    place = 1
    while (field := FIELD.match(text, place)) is not None and field[1] in names:
        try:
            value, place = json.JSONDecoder().raw_decode(text, field.end())
        except (ValueError, RecursionError):
            return _may_begin(field[1], text[field.end() :])
        rest = text[place:].lstrip()
        if not _may_be(field[1], value) or not rest.startswith(","):
            return not rest
        place, names = text.index(",", place) + 1, FIELDS
    rest = text[place:].strip()
    return any(f'"{name}"'.startswith(rest) for name in names)


def _may_be(name: str, value: Any) -> bool:
    """Whether the field of a record may have the value."""
    if name == "id":
        return isinstance(value, str) and NUMBERED.fullmatch(value) is not None
    if name == "custom_id":
        return isinstance(value, str)
    return value is None or isinstance(value, dict)


def _may_begin(name: str, text: str) -> bool:
    """Whether the field's value may begin with `text`, which is not a whole value."""
    if name == "id":
        return f'"{ID}'.startswith(text) or NUMBERED.fullmatch(text[1:]) is not None
    if name == "custom_id":
        return text[:1] in ("", '"')
    return text[:1] in ("", "{") or "null".startswith(text)
