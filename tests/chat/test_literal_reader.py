"""Literals of Python and JSON, read as JSON: by Python's own reader, and with every cut."""

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.chat.tool_formats.literal_reader import read_value
from nanovllm.chat.tool_formats.source import Source


def read(text: str, size: int = 0) -> tuple[str, str | None]:
    """What is written, and the rest of the text if there is a value."""
    source, written = Source(), ""
    steps, found = read_value(source), None
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    for piece in [*pieces, None]:
        if piece is None:
            source.ended = True
        else:
            source.add(piece)
        while found is None:
            try:
                part = next(steps)
            except StopIteration as stop:
                found = stop.value
                break
            if part is None:
                break
            written += part.arguments
    assert found is not None, "there is nothing to wait for"
    return written, source.text[source.at :] if found else None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.text(
    "'\"\\\nux4n{}[],:", max_size=8
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(VALUES)
def test_what_python_writes_is_read(value: Any) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        written, rest = read(text + ")")
        assert json.loads(written) == value
        assert rest == ")"


@settings(deadline=None)
@given(st.text("'\"\\\nux4n{}[],: 1.-eTrue", max_size=14), st.integers(1, 3))
def test_cuts_change_nothing(text: str, size: int) -> None:
    assert read(text, size) == read(text)


@settings(deadline=None)
@given(st.text("'\"\\nux4{}[],: 1.-e_N", max_size=10))
def test_it_agrees_with_python(text: str) -> None:
    """Where that reads a value that JSON can have, and no tuple or set."""
    try:
        value = ast.literal_eval(text)
        expected = json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return
    if json.loads(expected) != value or text.lstrip() != text:
        return  # a tuple, a key that is no text
    written, rest = read(text)
    if rest == "":
        assert json.loads(written) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("1_000", 1000),
        ("+1", 1),
        ("0x10", 16),
        ("-.5", -0.5),
        ("1.", 1),
        ("1e5", 1e5),
        ("[1, [2,],]", [1, [2]]),
        ("{'a': {}, \"b\": [ ]}", {"a": {}, "b": []}),
        (r"'\x41é\U0001F600\101\n\'\"\\'", "Aé😀A\n'\"\\"),
        ('"\\ud83d\\ude00"', "😀"),
        ("'''it's\n\"so\"'''", 'it\'s\n"so"'),
        ('""', ""),
        (r"'C:\users \d \x4 \/ \N{DASH}'", r"C:\users \d \x4 / \N{DASH}"),
        ("'a\\\nb'", "ab"),
        ("'line\nline'", "line\nline"),
    ],
)
def test_values(text: str, value: Any) -> None:
    written, rest = read(text)
    assert (json.loads(written), rest) == (value, "")


def test_a_number_may_have_more_digits_than_python_parses() -> None:
    assert read("9" * 5000) == ("9" * 5000, "")


@pytest.mark.parametrize(
    "text",
    ["", "x", "nan", "-inf", "1__0", "007", "1e999_0", "'a", "'a\\", "[1", "[1 2]", "[,]", "{1: 2}",
     "{'a'}", "{'a' 1}", "(1,)", "f'a'", "a+b", "[1}", "{'a': 1]"],
)  # fmt: skip
def test_what_is_no_literal(text: str) -> None:
    assert read(text)[1] is None


def test_deep_nesting_needs_no_stack() -> None:
    depth = 10_000
    text = "[" * depth + "]" * depth
    assert read(text) == (text, "")
    assert read("[" * depth)[1] is None
    nested = '{"a": ' * depth + "1" + "}" * depth
    assert read(nested) == (nested, "")


def test_numbers_stay_finite() -> None:
    written, _ = read("1_0e300")
    assert math.isfinite(json.loads(written))
