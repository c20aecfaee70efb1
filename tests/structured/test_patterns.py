"""Patterns mean what they mean for users: in Python's `re`, or in schemas in ECMAScript."""

import json
import re
import sys
import warnings

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import StructuredOutputs
from nanovllm.structured.patterns import ecma_pattern, portable, python_pattern
from tests.grammar_words import accepts
from tests.structured.test_grammars import GRAMMARS, walk

PIECES = st.sampled_from(
    [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "a", "-", "&", "~", " ", "#", "é", "ß", "k",
     "S", r"\x41", r"\-", r"\]", r"\\", r"\u0660", "/", "\n", r"\n", "[", "&&", "--", "~~", "_",
     "\u017f"]
)  # fmt: skip
RANGES = st.sampled_from(["a-f", "0-9", "+--", " -~", r"\x00-\x20", "\u0660-\u0669", "!-#"])
SETS = st.builds(
    lambda negated, inner: f"[{negated}{''.join(inner)}]",
    st.sampled_from(["", "^"]), st.lists(PIECES | RANGES, min_size=1, max_size=4),
)  # fmt: skip
ATOMS = (PIECES | SETS).filter(lambda piece: piece != "[")
REPEATED = st.builds(str.__add__, ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}?"]))
GROUPED = st.recursive(
    REPEATED,
    lambda inner: st.builds(
        lambda way, parts: way.replace("X", "".join(parts)).replace("Y", "|".join(parts)),
        st.sampled_from(["(?:X)", "(Y)", "(?P<n>X)?", "(?:Y)+", "(?i:X)"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
PATTERNS = st.builds(
    lambda flags, parts: flags + "".join(parts),
    st.sampled_from(["", "", "", "(?u)", "(?i)", "(?x)", "(?s)"]),
    st.lists(GROUPED, min_size=1, max_size=4),
)


@settings(max_examples=examples(250), deadline=None)
@given(PATTERNS, st.integers(0, 9))
@example(r"\d{4}", 1)
@example(r"[^\S]", 1)
@example(r"[^\W\d]\W", 2)
@example("[a&&b]", 1)
@example("(?x)[^ a] # [", 1)
@example(r"(?u)\w", 3)
@example("(?x)\n", 0)
@example("(?x)a # b\nc\x85", 0)
def test_what_is_generated_is_matched_by_pythons_re(pattern: str, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of sets in sets, which Python may get
        try:
            compiled = re.compile(pattern)
        except re.error:
            assume(False)
    try:
        GRAMMARS.constraint(StructuredOutputs(regex=pattern))
    except ValueError:
        assume(False)  # llguidance has no anchors, or finds nothing that matches
    text = walk(StructuredOutputs(regex=pattern), seed)
    if text is not None:
        assert compiled.fullmatch(text.decode()), text.decode()


@pytest.mark.parametrize("flags", ["", "(?u)"])
@pytest.mark.parametrize("letter", "dwsDWS")
def test_a_class_has_no_character_that_python_refuses(letter: str, flags: str) -> None:
    """Of all of Unicode, as one negated text: nothing but them is left to generate."""
    pythons = set(re.findall(rf"\{letter}", "".join(map(chr, every_character()))))
    for char in SOME:
        asked = StructuredOutputs(regex=rf"{flags}\{letter}")
        taken = accepts(GRAMMARS.constraint(asked), char)
        assert not taken or char in pythons, hex(ord(char))
        if flags:
            assert taken == (char in pythons), hex(ord(char))
        elif letter.islower():
            assert taken == (
                char in pythons and ord(char) < 0x80 and char not in "\x1c\x1d\x1e\x1f"
            )


def every_character() -> list[int]:
    return [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]


# ASCII, digits of other scripts (new ones, too), numbers, marks, joiners, blanks.
SOME = [
    *map(chr, range(128)),
    *"٣१\U0001ccf2²½Ⅷ\u3007\u0301\u200d\u0345\xa0\x85\u2003\u2028\ufeffé中ß_",
]


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [(r"^\d$", "7", "٣"), (r"^\D$", "٣", "7"), (r"^\w$", "_", "é"), (r"^\W$", "é", "a"),
     (r"^\s$", "\ufeff", "\x85"), (r"^\S$", "\x85", "\ufeff"), (r"^[^\d]$", "٣", "7"),
     (r"^[\w.]$", ".", "é"), (r"^[^\s]$", "\x1c", "\xa0"), (r"^[a&&b]$", "&", "c")],
)  # fmt: skip
def test_patterns_in_schemas_are_ecmascripts(pattern: str, allowed: str, refused: str) -> None:
    asked = StructuredOutputs(json={"type": "string", "pattern": pattern})
    if ord(allowed) >= 0x20:  # JSON has no such characters
        assert accepts(GRAMMARS.constraint(asked), f'"{allowed}"')
    assert not accepts(GRAMMARS.constraint(asked), f'"{refused}"')


def test_names_with_patterns_are_ecmascripts_too() -> None:
    schema = {"patternProperties": {r"^\d$": {"type": "null"}}, "additionalProperties": False}
    asked = StructuredOutputs(json={"type": "object", **schema})
    assert accepts(GRAMMARS.constraint(asked), '{"7":null}')
    assert not accepts(GRAMMARS.constraint(asked), '{"٣":null}')


def test_patterns_that_become_equal_stay_two() -> None:
    written = portable({"patternProperties": {r"\d": {"type": "null"}, "[0-9]": {"const": 1}}})
    assert written == {"patternProperties": {"[0-9]": {"type": "null"}, "[0-9](?:)": {"const": 1}}}


def test_a_schema_without_patterns_is_the_same() -> None:
    schema = {"type": "object", "properties": {"pattern": {"const": 1}}}
    assert portable(schema) is schema


@pytest.mark.parametrize("pattern", ["a*+", "a++b", "(?:ab)?+", "a{2,3}+"])
def test_possessive_repetitions_are_refused(pattern: str) -> None:
    """For Rust `a++` is a group that repeats, for Python one that gives nothing back."""
    with pytest.raises(ValueError, match="possessive repetitions"):
        GRAMMARS.constraint(StructuredOutputs(regex=pattern))


@pytest.mark.parametrize("form", ["(?u){}", "(?u)[{}]", "(?u)[^{}]"])
@pytest.mark.parametrize("letter", "wW")
def test_a_pattern_that_grows_too_long_is_refused(form: str, letter: str) -> None:
    r"""Python's `\w` is 12,700 characters: a pattern of 256 KiB would take gigabytes."""
    with pytest.raises(ValueError, match="at most 1048576 characters"):
        python_pattern(form.format(rf"\{letter}" * 100))


def test_the_patterns_of_a_structural_tag_are_bounded_together() -> None:
    one = {"type": "regex", "pattern": "(?u)" + r"\w" * 50}
    tag = {"format": {"type": "or", "elements": [one, one]}}
    with pytest.raises(ValueError, match="at most 1048576 characters together"):
        GRAMMARS.constraint(StructuredOutputs(structural_tag=json.dumps(tag)))


def test_a_plain_pattern_is_written_as_it_is() -> None:
    for pattern in (
        "^a+?b{2,}$",
        r"\x41\.[a-f\]0-9]",
        "(?:x|y)*",
        r"[^\]a]",
        "[[:alpha:]_]",
        "a[b",
    ):
        assert ecma_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", [r"[\d.]", r"[^\W-]\S", r"[[]&&[\D]", r"\w[\S]"])
def test_a_pattern_may_be_written_twice(pattern: str) -> None:
    """As those in a grammar within a grammar are."""
    written = ecma_pattern(pattern)
    assert written != pattern
    assert ecma_pattern(written) == written


@pytest.mark.parametrize("letter", "dws")
def test_what_is_not_in_a_class_is_in_its_other(letter: str) -> None:
    for char in SOME:
        one, other = (
            accepts(GRAMMARS.constraint(StructuredOutputs(json={"pattern": f"^[{way}]$"})), text)
            for text in [f'"{char}"'] for way in (rf"\{letter}", rf"\{letter.upper()}")
        )  # fmt: skip
        assert one != other or char in '"\\' or ord(char) < 0x20 or char == "\x7f", char
