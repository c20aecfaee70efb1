"""What values the fields of bodies take: the checks of their parsers, with JSON schemas.

/openapi.json shows the schemas. `SamplingParams` describes its own fields.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nanovllm.openai.request_id import REQUEST_ID, check_request_id
from nanovllm.prompt_dicts import MOST_CHARACTERS, salt_number
from nanovllm.utils.checks import check_choice, check_int
from nanovllm.utils.json_text import check_json_bool, shorten_json

Schema = dict[str, Any]


class Kind(NamedTuple):
    """A check, which raises for values that a field does not take, and their JSON schema."""

    check: Callable[[str, Any], Any]
    schema: Schema


def integer(low: int, high: int | None = None) -> Kind:
    """Integers from `low` to `high`, both included."""
    most = {} if high is None else {"maximum": high}
    schema = {"type": "integer", "minimum": low, **most}
    return Kind(lambda name, value: check_int(name, value, low, high), schema)


def choice(*choices: str) -> Kind:
    """One of these texts."""
    schema = {"type": "string", "enum": list(choices)}
    return Kind(lambda name, value: check_choice(name, value, choices), schema)


def _json_type(words: str, types: tuple[type, ...], schema: Schema) -> Kind:
    """The values of some types of JSON, in words that complete "must be"."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{name} must be {words}, got {shorten_json(value)}")

    return Kind(check, schema)


def _check_objects(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise TypeError(f"{name} must be a list of objects, got {shorten_json(value)}")


def described(schema: Schema) -> Kind:
    """A kind whose values are checked where they are used; `schema` says what is common to them."""
    return Kind(lambda _name, _value: None, schema)


SWITCH = Kind(check_json_bool, {"type": "boolean"})
TEXT = _json_type("a text", (str,), {"type": "string"})
OBJECT = _json_type("an object", (Mapping,), {"type": "object"})
LIST = _json_type("a list", (list,), {"type": "array"})
OBJECTS = Kind(_check_objects, {"type": "array", "items": {"type": "object"}})
TEXT_OR_OBJECT = described({"type": ["string", "object"]})
TEXT_OR_LIST = described({"type": ["string", "array"]})
FLAG_OR_OBJECT = _json_type("an object", (bool, Mapping), {"type": ["boolean", "object"]})
FLAG_OR_COUNT = described({"type": ["boolean", "integer"], "minimum": 0})
ID = Kind(check_request_id, {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
SALT = Kind(
    lambda name, value: salt_number(value, name), {"type": "string", "maxLength": MOST_CHARACTERS}
)
IDS = _json_type("a list of token ids", (list,), _IDS)
PROMPTS = described({"$ref": "#/components/schemas/Prompts"})
MESSAGES = described({"type": "array", "items": {"$ref": "#/components/schemas/Message"}})
AS_TEXT = described({"type": "string"})  # its check has words of its own
AS_OBJECT = described({"type": "object"})
AS_OBJECTS = described({"type": "array", "items": {"type": "object"}})


def check_kinds(given: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raise for a given field with a value that its kind does not take."""
    for name, value in given.items():
        if name in kinds:
            kinds[name].check(name, value)
