"""Structural tags: which texts they take, by tables, by brute force, and by random walks."""

import itertools
import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import StructuredOutputs
from nanovllm.structured.constraint import GrammarConstraint
from nanovllm.structured.structural_tags import formats, grammar
from tests.grammar_words import (
    BYTES,
    CALL,
    END_CALL,
    EOS,
    OTHER_EOS,
    SIZE,
    THINK,
    accepts,
    allowed,
    allowed_by,
    forced_by,
    sequence_of,
    words_grammars,
)

GRAMMARS = words_grammars()
ENDS = {EOS, OTHER_EOS}
TEXT = {"type": "any_text"}


def compiled(node: Any) -> GrammarConstraint:
    tag = {"type": "structural_tag", "format": node}
    return GRAMMARS.constraint(StructuredOutputs(structural_tag=tag))


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": [*elements]}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def token(name: int | str) -> dict[str, Any]:
    return {"type": "token", "token": name}


def triggered(**others: Any) -> dict[str, Any]:
    tags = [
        tag("<f=a>", schema({"enum": [1, 22]}), "</f>"),
        tag("<f=b>", const("x"), ["</f>", "</g>"]),
        {"begin": "[b]", "content": regex("[xy]*"), "end": "[e]"},
    ]
    return {"type": "triggered_tags", "triggers": ["<f=", "["], "tags": tags, **others}


def separated(**others: Any) -> dict[str, Any]:
    tags = [tag("<a>", const("1"), "</a>"), tag("<b>", schema({"const": 2}), "</b>")]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", **others}


def dispatch(**others: Any) -> dict[str, Any]:
    rules = [["<a>", const("1")], ["<b>", schema({"const": 2})]]
    return {"type": "dispatch", "rules": rules, **others}


# Formats, what they take, and what they do not.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a "é"\n\\日本'), ['a "é"\n\\日本'], ["", "a", 'a "é"\n\\日本x']),
    "an empty const_string": (sequence(const(""), const("a")), ["a"], ["", "aa"]),
    "json_schema": (
        schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        ['{"a": 12}', '{"a":1}'], ["", "{}", '{"a":"x"}', '{"a":1}x'],
    ),
    "any json": (schema(True), ["[1]", "null", '{"a": 1}'], ["", "x"]),
    "regex": (regex("[a-c]+/\\d"), ["ab/1"], ["", "ab", "ab/1x"]),
    "a grammar": (
        {"type": "grammar", "grammar": 'root ::= "a" [bc] rest?\nrest ::= "d" | "é"'},
        ["ab", "acd", "abé"], ["a", "ad"],
    ),
    "grammars": (
        sequence({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "b"+'}, const("x"),
                 {"type": "grammar", "grammar": 'start: "a" b // a note\nb: /c/ {2}'}),
        ["abxacc", "abbbxacc"], ["abxac", "abxab"],
    ),
    "any_text": (TEXT, ["", "a\n日本", "<f=a>"], []),
    "any_text without some": (
        {"type": "any_text", "excludes": ["BAD", "[x"]}, ["", "BA", "a\nD[y"],
        ["BAD", "aBADb", "[x"],
    ),
    "a long const_string": (const("ab" * 50_000 + "!"), ["ab" * 50_000 + "!"], ["ab" * 50_000]),
    "sequence": (sequence(const("a"), schema({"const": 1}), const("b")), ["a1b"], ["a1", "ab"]),
    "text, then a text": (
        sequence(TEXT, const("END"), const("!")), ["END!", "aEN\nEEND!"], ["", "aEND", "END!x"]
    ),
    "text, then tags": (
        sequence(TEXT, either(tag("<a>", const("1"), "</a>"), const("<b>")), const("!")),
        ["<a>1</a>!", "x\n<b>!", "xy<a>1</a>!"], ["", "x", "x<a>2</a>!", "x<b>"],
    ),
    "text, then a sequence": (
        sequence(TEXT, sequence(const("<a>"), schema({"const": 1})), const("!")),
        ["<a>1!", "x<a>1!"], ["x<a>!", "1!"],
    ),
    "or": (either(const("ab"), const("abc"), schema({"const": 1})), ["ab", "abc", "1"], ["a", ""]),
    "or free text": (
        either(tag("<t>", TEXT, "</t>"), {"type": "any_text", "excludes": ["<t>"]}),
        ["", "free", "<t>a</t>"], ["<t>a"],
    ),
    "optional": (
        sequence({"type": "optional", "content": const("ab")}, const("ac")), ["ac", "abac"], ["ab"]
    ),
    "optional at the end": ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    "star": ({"type": "star", "content": const("ab")}, ["", "ab", "abab"], ["a", "aba"]),
    "plus": ({"type": "plus", "content": schema({"const": [1]})}, ["[1]", "[1][1]"], ["", "1"]),
    "repeat": (
        {"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]
    ),
    "repeat without a bound": (
        {"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "a" * 9], ["", "a"]
    ),
    "tag": (tag("<a>", const("x"), "</a>"), ["<a>x</a>"], ["<a>x", "<a>x</a>y", "x</a>"]),
    "tag of text": (
        tag("<think>", TEXT, "</think>"), ["<think></think>", "<think>a</thin\n</think>"],
        ["<think>a", "a</think>", "<think>a</think>b</think>"],
    ),
    "tag of a pattern": (
        tag("<a>", regex(".*"), "</a>"), ["<a></a>", "<a>xy</a>"], ["<a>x\n</a>", "<a>x</a>y</a>"]
    ),
    "several ends": (
        tag("<a>", TEXT, ["</a>", "<eoa>"]), ["<a>x</a>", "<a>x<eoa>"], ["<a>x", "<a>x<eoa></a>"]
    ),
    "no end": (sequence(tag("<a>", const("x"), ""), const("y")), ["<a>xy"], ["<a>x"]),
    "an end or none": (tag("<a>", const("x"), ["</a>", ""]), ["<a>x", "<a>x</a>"], ["<a>"]),
    "think, then answer": (
        sequence(tag("<think>", TEXT, "</think>"), schema({"enum": ["a", "b"]})),
        ['<think>x</think>"a"'], ["<think>x</think>", '"a"', '<think>x"a"'],
    ),
    "triggered_tags": (
        triggered(),
        ["", "free </f>", "<f=a>1</f>", "x<f=a>22</f>y<f=b>x</g>z", "[b]xyx[e]", "<f"],
        ["<f=", "<f=a>", "<f=a>3</f>", "<f=c>", "x[", "[c]", "[b]z[e]", "<f=a>1</g>"],
    ),
    "at least one": (
        triggered(at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f>text", "[b][e]x[b]y[e]"], ["", "x", "x<f=a>1</f>", "[b][e][c"],
    ),
    "at most one": (
        triggered(stop_after_first=True),
        ["", "free", "<f=a>1</f>", "x<f=a>1</f>"], ["<f=a>1</f>x", "[b][e][b][e]"],
    ),
    "just one": (
        triggered(stop_after_first=True, at_least_one=True),
        ["<f=a>1</f>", "[b]x[e]"], ["", "x<f=a>1</f>", "<f=a>1</f>x"],
    ),
    "triggers and texts that may not be": (
        triggered(excludes=["STOP"]),
        ["", "STO", "a<f=a>1</f>b"], ["STOP", "aSTOP<f=a>1</f>", "<f=a>1</f>STOP"],
    ),
    "triggered_tags in a tag": (
        sequence(tag("<o>", triggered(), "</o>"), const("!")),
        ["<o></o>!", "<o>a<f=a>1</f>b</o>!"],
        ["<o>", "<o>a</o>", "<o><f=a>3</f></o>!", "<o></o>a</o>!"],
    ),
    "a trigger within another": (
        {"type": "triggered_tags", "triggers": ["<ab", "<a"],
         "tags": [tag("<abc>", const("1"), "!"), tag("<a>", const("2"), "!")]},
        ["x<abc>1!", "<a>2!y"], ["<ab>", "<abc>2!"],
    ),
    "tags_with_separator": (
        separated(),
        ["", "<a>1</a>", "<a>1</a>\n<b>2</b>\n<a>1</a>"],
        ["\n", "<a>1</a>\n", "<a>1</a><b>2</b>", "<a>2</a>", "x"],
    ),
    "at least one, separated": (separated(at_least_one=True), ["<a>1</a>\n<a>1</a>"], ["", "\n"]),
    "at most one, separated": (
        separated(stop_after_first=True), ["", "<b>2</b>"], ["<b>2</b>\n<b>2</b>"]
    ),
    "no separator": (
        separated(separator="", at_least_one=True), ["<b>2</b>", "<b>2</b><a>1</a>"], [""]
    ),
    "a separator that begins as the end does": (
        tag("<|x|>", separated(), "\n<end>"),
        ["<|x|>\n<end>", "<|x|><a>1</a>\n<b>2</b>\n<end>"],
        ["<|x|><a>1</a>", "<|x|><a>1</a>\n\n<end>"],
    ),
    "dispatch": (
        dispatch(), ["", "x", "x<a>1y<b>2", "<a>1<a>1"], ["<a>", "<a>2", "x<b>1"]
    ),
    "dispatch once": (dispatch(loop=False), ["", "x", "x<a>1"], ["<a>1x", "<a>1<b>2"]),
    "dispatch in a tag": (
        tag("<o>", dispatch(excludes=["</o>"]), "</o>"),
        ["<o>x</o>", "<o>x<a>1y</o>"], ["<o>", "<o><a></o>", "<o></o></o>"],
    ),
}  # fmt: skip


def test_each_format_is_written_by_a_function_of_its_own() -> None:
    assert set(grammar.FUNCTIONS) == set(formats.FORMATS)
    assert len(set(grammar.FUNCTIONS.values())) == len(grammar.FUNCTIONS)


@pytest.mark.parametrize("name", CASES)
def test_formats_take_their_texts_alone(name: str) -> None:
    node, texts, others = CASES[name]
    constraint = compiled(node)
    assert [text for text in texts if not accepts(constraint, text)] == []
    assert [text for text in others if accepts(constraint, text)] == []


def takes(constraint: GrammarConstraint, ids: list[int]) -> bool:
    matcher = constraint.after(ids)
    return matcher is not None and matcher.is_accepting()


@pytest.mark.parametrize("name", ["</think>", THINK])
def test_tokens_are_taken_as_tokens(name: int | str) -> None:
    """By their ids or their texts; not as the letters of their text."""
    node = tag(token("<call>"), {"type": "any_tokens"}, token(name))
    constraint = compiled(node)
    assert takes(constraint, [CALL, 97, END_CALL, 98, THINK])
    assert takes(constraint, [CALL, THINK])
    for ids in ([*b"<call>", THINK], [CALL, *b"</think>"], [CALL, 97], [CALL, THINK, 97]):
        assert not takes(constraint, ids)
    assert allowed(constraint, [CALL, 97]) == set(range(SIZE)) - ENDS


def test_free_tokens_are_counted_and_excluded() -> None:
    node = {"type": "any_tokens", "max_tokens": 2, "exclude_tokens": ["</call>", 97]}
    constraint = compiled(sequence(node, token(THINK)))
    for ids in ([THINK], [98, THINK], [98, CALL, THINK]):
        assert takes(constraint, ids)
    for ids in ([98, 98, 98, THINK], [97, THINK], [END_CALL, THINK], [98]):
        assert not takes(constraint, ids)
    one = compiled({"type": "exclude_token", "exclude_tokens": [97]})
    assert allowed(one) == set(range(SIZE)) - ENDS - {97}
    assert allowed(one, [98]) == ENDS


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_tokens_may_be_triggers(least: bool, once: bool) -> None:
    node = {
        "type": "token_triggered_tags", "trigger_tokens": ["<call>"], "exclude_tokens": [ord("X")],
        "tags": [tag(token(CALL), schema({"const": 1}), token("</call>"))],
        "at_least_one": least, "stop_after_first": once,
    }  # fmt: skip
    constraint = compiled(node)
    call = [CALL, ord("1"), END_CALL]
    assert takes(constraint, call)
    assert takes(constraint, []) is not least
    assert takes(constraint, [97, *call]) is not least
    assert takes(constraint, [*call, 97, *call, 98]) is not once
    for ids in ([CALL], [CALL, ord("2")], [ord("X")], [*call, ord("X")]):
        assert not takes(constraint, ids)


def test_tokens_may_be_dispatched() -> None:
    node = {"type": "token_dispatch", "rules": [["<call>", const("1")], [THINK, const("2")]]}
    constraint = compiled(node)
    for ids in ([], [97, CALL, ord("1"), 98, THINK, ord("2")], [END_CALL]):
        assert takes(constraint, ids)
    for ids in ([CALL], [CALL, ord("2")]):
        assert not takes(constraint, ids)


def test_a_text_that_names_a_token_is_either() -> None:
    constraint = compiled(sequence(tag("<call>", TEXT, "</call>"), const("!")))
    begins, ends = [[CALL], [*b"<call>"]], [[END_CALL], [*b"</call>"]]
    for begin, end in itertools.product(begins, ends):
        assert takes(constraint, [*begin, 97, *end, ord("!")])
        assert not takes(constraint, [*begin, 97, *end])


def test_the_output_ends_at_its_end_alone() -> None:
    """A token that ends it may stand for the text behind which nothing must come."""
    last = compiled(sequence(const("a"), tag("<", TEXT, "<|eos|>")))
    assert EOS in allowed(last, [*b"a<x"])
    inner = compiled(sequence(tag("<", TEXT, "<|eos|>"), const("a")))
    assert EOS not in allowed(inner, [*b"<x"])
    assert accepts(inner, "<x<|eos|>a")
    with pytest.raises(ValueError, match=f"the token {EOS} ends the output"):
        compiled(sequence(tag("<", TEXT, token(EOS)), const("a")))


FINITE = {
    "sequence": (
        sequence(const("a"), {"type": "optional", "content": const("b")}, either(
            tag("", schema({"enum": [12, None]}), "\n\n"), const("é"))),
        {"a" + b + rest for b in ("", "b") for rest in ("12\n\n", "null\n\n", "é")},
    ),
    "repeat": (
        {"type": "repeat", "min": 1, "max": 3, "content": either(const("ab"), const("日本"))},
        {"".join(p) for n in (1, 2, 3) for p in itertools.product(("ab", "日本"), repeat=n)},
    ),
    "separated": (
        sequence(separated(stop_after_first=True), const("abc")),
        {"abc", "<a>1</a>abc", "<b>2</b>abc"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
def test_masks_equal_brute_force_of_formats(name: str) -> None:
    node, texts = FINITE[name]
    language = {text.encode() for text in texts}
    seen, left = set(), [((), b"")]
    while left:
        ids, text = left.pop()
        if text in seen:
            continue
        seen.add(text)
        constraint = compiled(node)
        constraint.update(sequence_of(ids))
        found = allowed(constraint)
        if found != allowed_by(language, text):
            assert found == forced_by(language, text), (ids, text)
        left += [((*ids, i), text + BYTES[i]) for i in found - ENDS]
    assert language <= seen


# Random formats with Python's pattern for the same language.
Pair = tuple[dict[str, Any], str]
SHORT = st.sampled_from(["a", "ab", "<a>", "</a>", "\n", "\n<", "é", "1", "b<"])


def _leaf(text: str) -> Pair:
    return const(text), re.escape(text)


def _joined(pairs: list[Pair]) -> Pair:
    return sequence(*(p[0] for p in pairs)), "".join(f"(?:{p[1]})" for p in pairs)


def _either(pairs: list[Pair]) -> Pair:
    return either(*(p[0] for p in pairs)), "|".join(f"(?:{p[1]})" for p in pairs)


def _tagged(begin: str, pair: Pair, end: str) -> Pair:
    return tag(begin, pair[0], end), f"{re.escape(begin)}(?:{pair[1]}){re.escape(end)}"


def _times(kind: tuple[str, str], pair: Pair) -> Pair:
    """White space may come where JSON could, also if none does."""
    space = r"\s*" if "json_schema" in json.dumps(pair[0]) else ""
    return {"type": kind[0], "content": pair[0]}, f"{space}(?:{pair[1]}){kind[1]}{space}"


def _triggered(trigger: str, pair: Pair, end: str, least: bool) -> Pair:
    one = tag(trigger + "!", pair[0], end)
    free = f"(?:(?!{re.escape(trigger)})(?s:.))*"
    called = f"{re.escape(trigger)}!(?:{pair[1]}){re.escape(end)}"
    node = {"type": "triggered_tags", "triggers": [trigger], "tags": [one], "at_least_one": least}
    return node, (f"{called}" if least else "") + f"(?:{free}{called})*{free}"


LEAVES = st.one_of(
    st.builds(_leaf, SHORT),
    st.just((schema({"enum": [1, "a"]}), r'\s*(?:1|"a")\s*')),
    st.just((regex("[ab]{1,2}"), "[ab]{1,2}")),
)


def _nested(parts: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    some = st.lists(parts, min_size=1, max_size=3)
    kinds = st.sampled_from([("optional", "?"), ("star", "*"), ("plus", "+")])
    return st.one_of(
        st.builds(_joined, some), st.builds(_either, some),
        st.builds(_tagged, SHORT, parts, SHORT), st.builds(_times, kinds, parts),
        st.builds(_tagged, SHORT, st.just((TEXT, "(?s:.*)")), SHORT),
    )  # fmt: skip


CLOSED = st.recursive(LEAVES, _nested, max_leaves=6)
PAIRS = CLOSED | st.builds(_triggered, st.sampled_from(["<", "ab"]), CLOSED, SHORT, st.booleans())


def _walk(constraint: GrammarConstraint, seed: int, most: int = 60) -> str | None:
    """Random allowed tokens to an end; None if it is not reached."""
    rng, ids = random.Random(seed), []
    for _ in range(most):
        found = allowed(constraint, ids)
        assert found, bytes(b"".join(BYTES[i] for i in ids))
        if found & ENDS and (found <= ENDS or rng.random() < 0.3):
            return b"".join(BYTES[i] for i in ids).decode()
        ways = sorted(found - ENDS)
        markup = [i for i in ways if BYTES[i][:1] in b'<>!/ab\n1"']
        ids.append(rng.choice(markup if markup and rng.random() < 0.8 else ways))
    return None


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=PAIRS, seed=st.integers(0, 2**32))
def test_walks_through_random_formats_match(pair: Pair, seed: int) -> None:
    node, pattern = pair
    constraint = compiled(node)
    for number in range(3):
        text = _walk(constraint, seed + number)
        if text is not None:  # an end that JSON may begin with may have white space behind it
            ends = range(len(text.rstrip()), len(text) + 1)
            assert any(re.fullmatch(pattern, text[:end]) for end in ends), (node, text)


WRONG: dict[str, tuple[Any, str]] = {
    "no type": ({}, "format must be an object with a `type`, got {}"),
    "a list": ([], "format must be an object"),
    "an unknown type": ({"type": "const_strin"}, "format: no format has the type 'const_strin'; d"),
    "a missing field": ({"type": "const_string"}, "format: const_string must have 'value'"),
    "an unknown field": ({**TEXT, "exclude": []}, "format: any_text has no 'exclude'; did you m"),
    "a number": (const(3), "format/value must be a text, got 3"),  # type: ignore[arg-type]
    "no elements": (sequence(), "format/elements must not be empty"),
    "an element": (sequence(const("a"), 3), "format/elements must be a list of objects"),
    "a place": (
        sequence(const("a"), either(TEXT, tag("", {"type": "x"}, ""))),
        "format/elements/1/elements/1/content: no format has the type 'x'",
    ),
    "text without an end": (sequence(TEXT, schema({})), "format/elements/0: nothing says where it"),
    "text in a loop": ({"type": "star", "content": TEXT}, "format/content: nothing says where it"),
    "a schema": (schema({"not": {}}), '"not".*format/json_schema/not'),
    "a slip in a schema": (
        tag("a", schema({"items": {"minimun": 1}}), "b"),
        "format/content/json_schema/items: .*did you mean 'minimum'",
    ),
    "no schema": (schema(False), "format/json_schema must be a JSON schema, got False"),
    "a style": ({**schema({}), "style": "qwen_xml"}, "style must be 'json', got 'qwen_xml'"),
    "any order": ({**schema({}), "any_order": True}, "any_order must be False, got True"),
    "a pattern": (sequence(regex("a("), const("b")), r"format/elements/0/pattern: .*a\("),
    "a grammar": (
        {"type": "grammar", "grammar": "root ::= ("}, "format/grammar: as GBNF, which ::= sta",
    ),
    "a budget of tokens": ({**TEXT, "max_tokens": 5}, "any_text has no 'max_tokens'"),
    "counts": ({"type": "repeat", "min": 3, "max": 2, "content": TEXT}, "format/max must .* >= 3"),
    "no trigger": (triggered(triggers=["x"]), "format/tags/0: no trigger begins '<f=a>'"),
    "no triggers": (triggered(triggers=[]), "format/triggers must be a list of texts that is not"),
    "an empty trigger": (triggered(triggers=[""]), "format/triggers must be texts that are not"),
    "another format for a tag": (separated(tags=[const("a")]), "format/tags/0 must be a tag"),
    "a flag": (separated(at_least_one=1), "format/at_least_one must be true or false, got 1"),
    "ends": (tag("a", TEXT, []), r"format/end must be a text, several, or .*, got \[\]"),
    "an end": (tag("a", TEXT, 3), "format/end must be a text or a format `token`, got 3"),
    "a token": (token("<nope>"), "format/token must be a token's id or the text of an added token"),
    "free tokens": (tag("a", {"type": "any_tokens"}, "</b>"), "format/content: free tokens end wi"),
    "too many parts": (
        sequence(*[const(f"{i:064}") for i in range(1900)]), "it has too many parts",
    ),
    "a rule": (dispatch(rules=[["a"]]), "format/rules/0 must be a pair"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_formats_are_refused_with_their_place(name: str) -> None:
    node, message = WRONG[name]
    with pytest.raises(ValueError, match=f"(?s)structured_outputs: structural_tag: .*{message}"):
        compiled(node)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": {"minimun": 1}}, "structural_tag: structures/0/schema: .*'minimun'"),
        ({"begin": "<g>"}, "structural_tag: structures/0: no trigger begins '<g>'"),
        ({"begin": 3}, "structural_tag: structures/0/begin must be a text"),
    ],
)
def test_errors_of_the_older_form_have_its_places(change: Any, message: str) -> None:
    part = {"begin": "<f>", "schema": {}, "end": "</f>", **change}
    described = {"triggers": ["<f"], "structures": [part]}
    for given_tag in (described, json.dumps({"type": "structural_tag", **described})):
        with pytest.raises(ValueError, match=message):
            GRAMMARS.constraint(StructuredOutputs(structural_tag=given_tag))


def test_formats_that_would_grow_without_end_are_refused() -> None:
    """What follows free text is written once for each way to begin."""
    two = either(const("a"), const("b"))
    with pytest.raises(ValueError, match="more than 2000 formats"):
        compiled(sequence(*[TEXT, two] * 30))
