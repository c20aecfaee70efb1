"""StructuredOutputs: the format that a request's output must have, for programs to read."""

import enum
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_text, shorten
from nanovllm.utils.list_checks import check_texts
from nanovllm.utils.option import (
    NOTHING,
    SOME_TEXT,
    TRUE_OR_FALSE,
    Rule,
    by_name,
    check_options,
    int_range,
    option,
)
from nanovllm.utils.other_names import OtherName

OTHER_NAMES = {
    "backend": OtherName((None,), "llguidance makes all constraints"),
    "disable_fallback": OtherName((False, True), "llguidance makes all constraints"),
}
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
GRAMMAR_SECONDS = 10.0  # to wait for a constraint that is compiled; for AsyncLLM and the server
MOST_AFTER = 256  # bytes; for each of them, tokens are listed that go on behind the marker


def _json_text(name: str, value: Any) -> str:
    """A JSON value as text. The order of names is kept, as the output has the same order."""
    from nanovllm.utils.json_text import parse_json

    try:
        text = value if isinstance(value, str) else _dumps(value)
        text = _dumps(parse_json(text))
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}; got {shorten(value)}") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    check_text(name, text)
    return text


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _schema_of(name: str, value: Any) -> Any:
    """The schema that pydantic makes of a type, a model or a TypeAdapter; or `value` itself.

    Its objects are closed, unless the type allows others, as pydantic's `extra="allow"` does.
    """
    make = getattr(value, "model_json_schema", None) or getattr(value, "json_schema", None)
    is_type = isinstance(value, type) or typing.get_origin(value) is not None
    if not callable(make) and not is_type:
        return value
    from nanovllm.utils.closed_schemas import closed

    try:
        if callable(make):
            return closed(make())
        from pydantic import TypeAdapter

        return closed(TypeAdapter(value).json_schema())
    except ImportError:
        raise TypeError(
            f"{name}: pydantic, which makes a schema of {shorten(value)}, is not installed"
        ) from None
    except Exception as error:  # of many types
        raise TypeError(f"{name} must be {SCHEMA.allowed}, got {shorten(value)}: {error}") from None


def _check_schema(name: str, value: Any) -> str:
    value = _schema_of(name, value)
    if not isinstance(value, str | Mapping | bool):
        raise TypeError(f"{name} must be {SCHEMA.allowed}, got {shorten(value)}")
    text = _json_text(name, value)
    if text[0] not in "{tf":
        raise ValueError(f"{name} must be {SCHEMA.allowed}, got {shorten(value)}")
    return text


def _check_tag(name: str, value: Any) -> str:
    if not isinstance(value, str | Mapping):
        raise TypeError(f"{name} must be {TAG.allowed}, got {shorten(value)}")
    return _json_text(name, value)


def _check_choice(name: str, value: Any) -> tuple[str, ...]:
    if typing.get_origin(value) is typing.Literal:
        value = typing.get_args(value)
    is_list = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    if is_list:
        value = [one.value if isinstance(one, enum.Enum) else one for one in value]
    texts = check_texts(name, value)
    if not texts:
        raise ValueError(f"{name} must be {CHOICE.allowed}, got []")
    return texts


def _check_marker(name: str, value: Any) -> str:
    text: str = SOME_TEXT.check(name, value)
    if (size := len(text.encode())) > MOST_AFTER:
        raise ValueError(f"{name} must have at most {MOST_AFTER} bytes, got {size}")
    return text


SCHEMA = Rule(_check_schema, "a JSON schema as a dict or a text, or a pydantic model or other type")
CHOICE = Rule(_check_choice, "a list of texts that is not empty, or an Enum of texts")
TAG = Rule(_check_tag, "a dict or its JSON text")
MARKER = Rule(_check_marker, f"a text of at most {MOST_AFTER} bytes that is not empty")


@by_name("structured output option", lambda: OTHER_NAMES)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The output's format: exactly one of the first six; docs/structured.md explains them.

    With `after_tokens` there may be none of them: then any text may follow the bounded one.
    """

    json: Any = option(None, "JSON that this schema describes", SCHEMA, none=NOTHING)
    json_object: bool = option(False, "any JSON object", TRUE_OR_FALSE)
    regex: str | None = option(
        None, "a text that this regular expression matches as a whole", SOME_TEXT, none=NOTHING
    )
    choice: Any = option(None, "one of these texts", CHOICE, none=NOTHING)
    grammar: str | None = option(
        None,
        "a text of this grammar: llguidance's Lark, or GBNF, which has ::= in its rules",
        SOME_TEXT,
        none=NOTHING,
    )
    structural_tag: Any = option(
        None,
        'free text with tagged parts: `{"type": "structural_tag", "format": {...}}`, or'
        ' `{"triggers": [...], "structures": [{"begin": ..., "schema": ..., "end": ...}]}`',
        TAG,
        none=NOTHING,
    )
    disable_any_whitespace: bool = option(
        False, "of JSON: no whitespace between its parts", TRUE_OR_FALSE
    )
    whitespace_pattern: str | None = option(
        None,
        "of JSON: a regular expression for the whitespace between its parts",
        SOME_TEXT,
        none="any whitespace",
    )
    disable_additional_properties: bool = option(
        False,
        "of JSON: objects have no other properties where the schema does not say whether they may"
        " (those of pydantic models and other types never have)",
        TRUE_OR_FALSE,
    )
    after: str | None = option(
        None,
        "a text, such as `</think>`, that the model may write anything before: the constraint"
        " begins behind it",
        MARKER,
        none="the constraint holds from the start",
    )
    after_tokens: int | None = option(
        None,
        "most tokens before `after`, which is then forced; with it, what comes after may be any"
        " text",
        int_range(0),
        none="any number",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.after_tokens is not None and self.after is None:
            raise ValueError("after_tokens needs after")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1 and not (given == [] and self.after_tokens is not None):
            got = " and ".join(given) or "none"
            raise ValueError(f"just one of {', '.join(KINDS)} must be given, got {got}")
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and not self.kind.startswith("json"):
            raise ValueError(f"whitespace options are for json and json_object, not {self.kind}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("give one of disable_any_whitespace and whitespace_pattern")
        if self.disable_additional_properties:
            self._close()

    def _close(self) -> None:
        """Let the objects of the schema have no other properties."""
        from nanovllm.utils.closed_schemas import closed

        if self.json is None:
            raise ValueError(f"disable_additional_properties is for json, not {self.kind}")
        try:
            text = _dumps(closed(json.loads(self.json)))
        except RecursionError:
            raise ValueError("json is nested too deeply") from None
        object.__setattr__(self, "json", text)

    @property
    def kind(self) -> str:
        """Which one of `KINDS` is set; "" for any text."""
        return next((name for name in KINDS if getattr(self, name) not in (None, False)), "")

    @property
    def size(self) -> int:
        """The characters of its texts."""
        values = (getattr(self, name) for name in (*KINDS, "whitespace_pattern", "after"))
        texts = (value for value in values if isinstance(value, str | tuple))
        return sum(sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts)


StructuredOutputsParams = StructuredOutputs  # vLLM's name


def check_structured_outputs(name: str, value: Any, allowed: str) -> StructuredOutputs:
    """Return a StructuredOutputs, or make it of a dict. `allowed` completes "must be"."""
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
    try:
        return StructuredOutputs(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
