"""Costs of patterns and schemas: what would compile for minutes is refused before."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import StructuredOutputs
from nanovllm.structured.costs import MOST_COST, check_lark, check_pattern, size_of_pattern
from nanovllm.structured.schemas import (
    MOST_ANNOTATIONS,
    MOST_NAME,
    MOST_OPTIONAL,
    MOST_PROPERTIES,
    check_schema,
    subschemas,
)
from tests.grammar_words import constrain, words_grammars

GRAMMARS = words_grammars()


@pytest.mark.parametrize(
    ("pattern", "cost"),
    [
        ("abc", 0),
        ("a?bc*", 6),
        ("a?b?c{0,2}", 3 * 5),  # `2}` counts as two parts
        (r"[a?]\?", 0),
        (r"[]?]?\??", 4),
        ("(a?b)(c?d)", 8),
        ("(a?b)?", 1 + 2),
        ("(a?b|c?)x?", 4 + 3),
        ("(?:a?)(?i)(?P<name>b?)", 4),
        ("a?|b?|cd?", 1 + 1 + 1 + 2),
        ("((((a?", 1),
        ("a?)b?", 4),
    ],
)
def test_the_cost_is_that_of_one_derivative(pattern: str, cost: int) -> None:
    assert size_of_pattern(pattern).whole.cost == cost


def _doubled(times: int) -> str:
    rules = (f"T{i}: T{i - 1} T{i - 1}" for i in range(1, times + 1))
    return "\n".join([f"start: T{times}", 'T0: "a"?', *rules])


EXPENSIVE: list[dict[str, Any]] = [
    dict(regex="a?" * 60_000),
    dict(regex="(a|)" * 3_000),
    dict(regex="(a?(b?))" * 3_000),
    dict(json=dict(type="string", pattern="a?" * 3_000)),
    dict(json=dict(patternProperties={"^(a?)" + "a*" * 3_000: {}})),
    dict(json={}, whitespace_pattern=" ?" * 3_000),
    dict(grammar=f"start: TEXT\nTEXT: /{'a?' * 3_000}/"),
    dict(grammar=f"start: /{'a?' * 3_000}/"),
    dict(grammar=_doubled(12)),
    dict(grammar=_doubled(300)),
    dict(grammar="start: T\nT: " + '"a"? ' * 3_000),
    dict(grammar="start: T\nT: " + '["a"] ' * 3_000),
    dict(grammar="start: T\nT: " + '("a" | )' * 3_000),
    dict(structural_tag=dict(format=dict(type="regex", pattern="a?" * 3_000))),
]


@pytest.mark.parametrize("number", range(len(EXPENSIVE)))
def test_an_expensive_pattern_is_an_error_before_it_is_compiled(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance

    def compiles(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is compiled")

    GRAMMARS._tokenizer()
    monkeypatch.setattr(llguidance.LLMatcher, "validate_grammar", compiles, raising=False)
    with pytest.raises(ValueError, match=f"too complex: .* at most {MOST_COST}, got"):
        constrain(GRAMMARS, **EXPENSIVE[number])


def test_ordinary_patterns_are_cheap() -> None:
    check_pattern("|".join(f"names?{i}" for i in range(10_000)))
    check_pattern("a?" * 2_000)
    check_lark("start: WORD\nWORD: " + " | ".join(f"/names?{i}/" for i in range(5_000)))
    check_lark('start: A | b\nA: B "x"?\nB: A\nb: /a?/')  # a circle is an error of llguidance's
    check_lark(_doubled(9))


def test_objects_have_a_limited_number_of_properties() -> None:
    names = [f"p{i}" for i in range(MOST_PROPERTIES + 1)]
    check_schema({"properties": {name: {} for name in names[:MOST_OPTIONAL]}})
    check_schema({"properties": {name: {} for name in names[:-1]}, "required": names[:-1]})
    with pytest.raises(ValueError, match=r"#/items: at most 1000 .* may be left out, got 1001"):
        check_schema({"items": {"properties": {name: {} for name in names[: MOST_OPTIONAL + 1]}}})
    with pytest.raises(ValueError, match=r"#: at most 10000 properties are possible, got 10001"):
        check_schema({"required": names})


def test_names_are_compared_with_keywords_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(name: str, _: Any) -> str:
        compared.append(name)
        return ""

    monkeypatch.setattr("nanovllm.structured.schemas.did_you_mean", compare)
    check_schema({"properties": {str(i): {"note": i, "type": "string"} for i in range(50)}})
    assert compared == ["note"]
    with pytest.raises(ValueError, match=f"at most {MOST_ANNOTATIONS} names"):
        check_schema({f"note{i}": i for i in range(5 * MOST_ANNOTATIONS)})
    assert len(compared) == MOST_ANNOTATIONS + 2


def test_places_of_parts_with_long_names_are_short() -> None:
    deep = {"properties": {"a" * 100_000: {"properties": {"b": {}, "c": {}}}}}
    places = [place for place, _ in subschemas(deep)]
    assert max(map(len, places)) < MOST_NAME + 100 and len(set(places)) == len(places) == 4


@pytest.mark.parametrize(
    "given",
    [
        dict(grammar='root ::= "' + '\\"' * 20_000),
        dict(grammar="root ::= [" + "\\]" * 20_000),
        dict(grammar='start: "' + '\\"' * 20_000),
        dict(grammar="start: /" + "\\/" * 20_000),
        dict(regex="[" * 20_000),
    ],
)
def test_a_text_without_an_end_is_an_error(given: dict[str, Any]) -> None:
    """Each of its letters is read once: 20,000 took seconds."""
    with pytest.raises(ValueError, match=f"structured_outputs: {next(iter(given))}: "):
        constrain(GRAMMARS, **given)


@pytest.mark.parametrize("depth", [200, 2_000])
def test_deep_nesting_is_an_error(depth: int) -> None:
    schema: Any = "{}"
    for _ in range(depth):
        schema = f'{{"items":{schema}}}'
    form: Any = '{"type":"const_string","value":"a"}'
    for _ in range(depth):
        form = f'{{"type":"sequence","elements":[{form}]}}'
    for given in (
        dict(json=schema),
        dict(grammar=f"start: %json {schema}"),
        dict(grammar="root ::= " + "(" * depth + '"a"' + ")" * depth),
        dict(regex="(" * (depth + 60) + "a" + ")" * (depth + 60)),
        dict(structural_tag=f'{{"type":"structural_tag","format":{form}}}'),
    ):
        try:
            constrain(GRAMMARS, **given)
        except ValueError:
            continue
        assert depth == 200


def test_the_size_is_that_of_the_texts() -> None:
    assert StructuredOutputs(choice=["ab", "cde"], after="x").size == 6
    assert StructuredOutputs(json_object=True, whitespace_pattern=" ?").size == 2


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (check_pattern, "(?P<a" * 50_000),
        (check_lark, f"start: A\nA{' ' * 250_000}x"),
        (check_lark, 'A: "' * 60_000),
        (check_lark, "A[" * 120_000),
    ],
    ids=["names", "blanks", "texts", "brackets"],
)
def test_what_has_no_end_is_read_once(check: Callable[[str], None], text: str) -> None:
    """A second at most; if each part is read to the end of the text, it is more than ten."""
    start = time.thread_time()
    check(text)
    assert time.thread_time() - start < 5
