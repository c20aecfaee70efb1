"""Grammars that users write: GBNF's escapes and classes, and the schemas in Lark."""

from typing import Any

import pytest

from nanovllm.structured.grammars import Grammars
from tests.grammar_words import accepts, constrain, words_grammars

GRAMMARS: Grammars = words_grammars()

# The right side of a rule of GBNF, texts that it takes, and others.
GBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "class by number": (r"[\u00e9]", ["é"], ["e", "u", "\\"]),
    "class by short number": (r"[\xe9\x09]", ["é", "\t"], ["e", "x", "9"]),
    "class by long number": (r"[\U0001F600]", ["😀"], ["U", "0"]),
    "class of marks by number": (r"[\u005d\u005b\u005e\u002d\u005c]", [*"][^-\\"], ["u", "0"]),
    "class without": (r"[^\u005d]", ["a", "u"], ["]"]),
    "range by numbers": (r"[\x41-\u0043]", ["A", "C"], ["x", "D", "-"]),
    "control characters": (r"[\u0000\x01\x7f]", ["\0", "\1", "\x7f"], ["x", "u"]),
    "escapes": (r"[\n\t\\\]\[\"\-\^b]", [*'\n\t\\]["-^b'], ["n", "t"]),
    "no set operators": ("[a&&b~~c]", [*"a&b~c"], []),
    "a dash at the start": ("[-a]", ["-", "a"], ["b"]),
    "a dash at the end": ("[a-]", ["-", "a"], ["b"]),
    "an escaped dash at the end": (r"[a\-]", ["-", "a"], ["\\", "x", "2"]),
    "a range to a dash": ("[+--]", [*"+,-"], ["."]),
    "a range from a dash": ("[--/]", [*"-./"], [","]),
    "a bracket": ("[[]", ["["], ["]"]),
    "text by number": (r'"\u00e9\xe9\U0001F600"', ["éé😀"], ["e"]),
    "text of marks by number": (r'"\u0022\u005c\u000a\u0041&~["', ['"\\\nA&~['], []),
    "control characters in a text": (r'("\x01a\x7f"){2}', ["\1a\x7f\1a\x7f"], ["\1a\x7f"]),
    "a backslash before a number": (r'"\\u0041"', ["\\u0041"], ["A", "\\A"]),
    "a class in a text": (r'"[\\x"', ["[\\x"], []),
    "comments": ('"a" # "[\\q\n', ["a"], []),
}


@pytest.mark.parametrize("name", GBNF)
def test_gbnf_takes_its_texts_alone(name: str) -> None:
    rule, texts, others = GBNF[name]
    constraint = constrain(GRAMMARS, grammar=f"root ::= {rule}")
    assert [text for text in texts if not accepts(constraint, text)] == []
    assert [text for text in others if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"\nroot ::= "b"', "the rule 'root' is given twice"),
        (r"root ::= [\d]", r"Invalid escape sequence .* at line 1"),
        ('root ::= a\na ::= [b\\ud800]', r"\\ud800 is no character, in line 2: \[b\\ud800\]"),
        (r'root ::= "\UFFFFFFFF"', r"\\UFFFFFFFF is no character, in line 1"),
        (r'root ::= "\u12"', r"Invalid .*u escape sequence"),
        ('foo ::= "a"', "No 'root' rule found"),
    ],
)  # fmt: skip
def test_wrong_gbnf_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"grammar: as GBNF, which ::= stands for: {message}"):
        constrain(GRAMMARS, grammar=grammar)


def test_schemas_in_lark_have_the_options_of_all_schemas() -> None:
    """A property cannot be written by escapes; how it is spaced may be chosen."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "uniqueItems": false}'
    constraint = constrain(GRAMMARS, grammar=f'start: "x" %json {schema} /[%]json/')
    assert accepts(constraint, 'x{"a" : 1}%json')
    assert not accepts(constraint, 'x{"\\u0061":"y"}%json')
    spacing = '{"whitespace_flexible": false, "item_separator": ", "}'
    spaced = constrain(
        GRAMMARS, grammar=f'start: %json {{"const": [1, 2], "x-guidance": {spacing}}}'
    )
    assert accepts(spaced, "[1, 2]") and not accepts(spaced, "[1,2]")


def test_what_is_no_schema_is_not_read_as_one() -> None:
    grammar = 'start: "%json {" | /%json [{]x/ | x // %json {"minimun":3}\n# %json {\nx: "y"'
    constraint = constrain(GRAMMARS, grammar=grammar)
    assert all(accepts(constraint, text) for text in ("%json {", "%json {x", "y"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"minimun": 3}', "%json in line 2: JSON Schema has no 'minimun'; did you mean 'minimum'"),
        ('{"items": {"minProperties": 3}}', "%json in line 2/items/minProperties: must be <= 1"),
        ('{"enum": ["\\u0001"]}', "%json in line 2/enum: no string is written with"),
        ('{"x-guidance": {"lenient": true}}', "%json in line 2/x-guidance: there may be .* alone"),
        ('{"type": "null", "type": "null"}', "%json in line 2: 'type' occurs twice"),
        ('{"items": {"not": {}}}', r"Unimplemented .*\(at %json in line 2/items/not\)"),
        ('{"oneOf": [{}, {}]}', r"write anyOf, .*\(at %json in line 2/oneOf\)"),
        ('{"pattern": "("}', r"unclosed group.* \(at %json in line 2/pattern\)"),
        ("{:}", "failed to parse"),
    ],
)
def test_schemas_in_lark_are_checked(schema: str, message: str) -> None:
    for grammar in (
        f'start: "a" x\nx: %json {schema}\n',
        f'start: "a" %lark {{\nstart: %json {schema}\n}}\n',
    ):
        with pytest.raises(ValueError, match=f"structured_outputs: grammar: .*{message}"):
            constrain(GRAMMARS, grammar=grammar)


def test_errors_of_lark_show_the_grammar() -> None:
    asked: dict[str, Any] = dict(grammar="start: a\na: /b(/")
    with pytest.raises(ValueError, match=r"(?s)unclosed group.*2 \| a: /b\(/"):
        constrain(GRAMMARS, **asked)
