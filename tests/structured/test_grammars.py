"""What grammars allow, by random walks; what they refuse; and that neither takes long."""

import contextlib
import itertools
import json
import queue
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from selection import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from waiting import little_work

from nanovllm import StructuredOutputs
from nanovllm.structured.compiled import CompiledGrammars
from nanovllm.structured.grammars import Grammars
from nanovllm.structured.vocabulary import described_tokenizer
from tests.grammar_words import (
    BYTES,
    CALL,
    END_CALL,
    EOS,
    OTHER_EOS,
    SIZE,
    accepts,
    allowed,
    constrain,
    sequence_of,
    words_grammars,
    words_tokenizer,
)

GRAMMARS = words_grammars()
ENDS = {EOS, OTHER_EOS}


def walk(asked: StructuredOutputs, seed: int, most: int = 400) -> bytes | None:
    """Random allowed tokens to the end of the grammar; None if it is not reached.

    Ends come as soon as they may after a while, and quotes and brackets sooner than others.
    """
    rng = random.Random(seed)
    constraint = GRAMMARS.constraint(asked)
    seq = sequence_of([])
    end = constraint.update(seq)
    while end is None:
        found = allowed(constraint)
        assert found, bytes(b"".join(BYTES[i] for i in seq.output_token_ids))
        if found & ENDS and (found == found & ENDS or rng.random() < 0.2):
            break
        ways = sorted(found - ENDS)
        closing = [i for i in ways if BYTES[i][-1:] in b'"]}']
        if closing and rng.random() < len(seq.output_token_ids) / 100:
            ways = closing
        seq.token_ids.append(rng.choice(ways))
        end = constraint.update(seq)
        if len(seq.output_token_ids) > most:
            return None
    assert end is None or end.reason == "stop", end
    return b"".join(BYTES[i] for i in seq.output_token_ids)


# None ends with a newline: before it, `$` matches in Python's patterns, which jsonschema uses.
NAMES = st.sampled_from(["a", "ab", "é", "日本", "x y", '"', "\nb", "/", "$ref", "minimum", "not"])
TEXTS = st.one_of(NAMES, st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4))
NUMBERS = st.integers(-1000, 1000) | st.sampled_from([0.5, -1.25, 1e3, 0.001])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2), max_leaves=4
)
PATTERNS = st.sampled_from(
    [
        "^a",
        "b$",
        "^[a-z]+$",
        "é|日",
        "^[0-9]{2,4}-[0-9]$",
        ".",
        "^(ab|c)*$",
        "[^a]",
        "[a-z] ",
        "^.{3}$",
    ]
)
FORMATS = st.sampled_from(
    ["date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
)


def some(keywords: dict[str, st.SearchStrategy[Any]], **always: Any) -> st.SearchStrategy[Any]:
    """A schema with some of the keywords."""
    fixed = {name: st.just(value) for name, value in always.items()}
    return st.fixed_dictionaries(fixed, optional=keywords)


COUNT = st.integers(0, 3)
STRINGS = some({"minLength": COUNT, "maxLength": st.integers(2, 6)}, type="string") | some(
    {"pattern": PATTERNS, "maxLength": st.integers(4, 30)}, type="string"
)
INTEGERS = some(
    {"minimum": st.integers(-20, 3), "exclusiveMaximum": st.integers(4, 200),
     "multipleOf": st.sampled_from([1, 2, 3, 7])},
    type="integer",
)  # fmt: skip
FLOATS = some(
    {"exclusiveMinimum": st.sampled_from([-1.5, 0, 0.25]), "maximum": st.sampled_from([1, 99.5])},
    type="number",
)
LEAVES = st.one_of(
    STRINGS, INTEGERS, FLOATS, some({"format": FORMATS}, type="string"),
    st.builds(lambda v: {"const": v}, VALUES),
    st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=3)),
    st.sampled_from([{"type": ["null", "boolean"]}, True, {}, {"$ref": "#/$defs/node"}]),
)  # fmt: skip


def _nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = some(
        {"required": st.lists(NAMES, max_size=2, unique=True),
         "additionalProperties": parts | st.just(False),
         "patternProperties": st.dictionaries(PATTERNS, parts, max_size=1),
         "minProperties": st.integers(0, 3), "maxProperties": st.integers(1, 4)},
        type="object",
    )  # fmt: skip
    named = st.builds(
        lambda schema, properties: {**schema, "properties": properties},
        objects, st.dictionaries(NAMES, parts, max_size=3),
    )  # fmt: skip
    arrays = some(
        {"items": parts | st.just(False), "prefixItems": st.lists(parts, min_size=1, max_size=2),
         "minItems": COUNT, "maxItems": st.integers(1, 4)},
        type="array",
    )  # fmt: skip
    both = st.builds(lambda a, b: {"allOf": [a, b]}, parts, parts)
    either = st.builds(lambda a, b: {"anyOf": [a, b]}, parts, parts)
    one = st.builds(lambda a, b: {"oneOf": [a, b]}, parts, parts)
    return st.one_of(objects, named, arrays, both, either, one)


NODE = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
SCHEMAS = st.recursive(LEAVES, _nested, max_leaves=6).map(
    lambda schema: {"$defs": {"node": NODE}, "allOf": [schema]} if schema is True else
    {"$defs": {"node": NODE}, **schema}
)  # fmt: skip


def check_walks(schema: Any, seed: int) -> None:
    spaced = {} if seed % 2 else {"disable_any_whitespace": True}
    asked = StructuredOutputs(json=schema, **spaced)
    try:
        GRAMMARS.constraint(asked)
    except ValueError:
        assume(False)
    validator = jsonschema.Draft202012Validator(schema)
    for number in range(3):
        text = walk(asked, seed + number)
        if text is not None:
            validator.validate(json.loads(text.decode()))


SETTINGS: dict[str, Any] = dict(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@settings(max_examples=examples(60), **SETTINGS)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_walks_through_random_schemas_are_valid(schema: Any, seed: int) -> None:
    check_walks(schema, seed)


@pytest.mark.slow
@settings(max_examples=examples(1200), **SETTINGS)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_walks_through_many_random_schemas_are_valid(schema: Any, seed: int) -> None:
    check_walks(schema, seed)


REGEXES = st.recursive(  # \\d and \\w follow Unicode's newest version, Python's may be older
    st.sampled_from(
        ["a", "é", "日", "[a-c]", "[^a-z]", ".", "[0-9]", "\\.", "\\n", "\\x41", "\\s", "😀", " "]
    ),
    lambda part: st.one_of(
        st.builds("{}{}".format, part, part),
        st.builds("({}|{})".format, part, part),
        st.builds("({}){}".format, part, st.sampled_from(["?", "*", "+", "{2}", "{0,3}", "+?"])),
        st.builds("(?i:{})".format, part),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(200), **SETTINGS)
@given(pattern=REGEXES, seed=st.integers(0, 2**32))
@example(pattern="(..)+", seed=0)  # takes "</think>", of eight characters
def test_walks_through_random_patterns_match(pattern: str, seed: int) -> None:
    for number in range(2):
        text = walk(StructuredOutputs(regex=pattern), seed + number)
        if text is not None:
            assert re.fullmatch(pattern, text.decode()), (pattern, text)


@settings(max_examples=examples(100), **SETTINGS)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["a", "ab", "é", "日本", "\n", '"', "\\", "\x7f", "😀", "/", " "]),
                 min_size=1, max_size=4).map("".join),
        min_size=1, max_size=8,
    ),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_walks_through_choices_choose(texts: list[str], seed: int) -> None:
    """With common beginnings, and equal ones."""
    asked = StructuredOutputs(choice=texts)
    for number in range(3):
        text = walk(asked, seed + number)
        assert text is not None
        assert text.decode() in texts
    assert all(accepts(GRAMMARS.constraint(asked), text) for text in texts)


def test_a_property_cannot_be_written_by_escapes() -> None:
    """As a name that may have any value; the same for names that a pattern is for."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}},
        "patternProperties": {"^b": {"type": "integer"}},
    }
    constraint = constrain(GRAMMARS, json=schema)
    for name in ("a", "\\u0061", "\\n", "\\u000a", "b", "\\u0062"):
        assert not accepts(constraint, f'{{"{name}":"x"}}'), name
    for text in ('{"a":1}', '{"\\n":1}', '{"b":1}', '{"c":"x"}'):
        assert accepts(constraint, text)


def test_notes_have_no_effect() -> None:
    schema = {
        "$comment": "x", "title": "minimum", "default": {"minimun": 1}, "examples": [{"not": 1}],
        "x-order": 1, "widget": "a", "type": "integer", "deprecated": True,
    }  # fmt: skip
    assert accepts(constrain(GRAMMARS, json=schema), "12")


def _deep(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


UNIQUE = {"type": "array", "items": {"type": "integer"}}
NEUTRAL: list[dict[str, Any]] = [
    {"uniqueItems": False}, {"minItems": 0}, {"minContains": 1}, {"maxContains": 2},
    {"contains": {"type": "null"}, "minContains": 0}, {"unevaluatedItems": True},
    {"unevaluatedItems": {}}, {"if": {"type": "null"}}, {"then": {"minItems": 9}},
    {"else": {"minItems": 9}}, {"not": False}, {"additionalItems": False}, {"prefixItems": []},
    {"dependentRequired": {}}, {"dependentSchemas": {}}, {"dependencies": {}},
    {"propertyNames": True}, {"propertyNames": {"type": "string"}}, {"propertyNames": {}},
    {"unevaluatedProperties": True}, {"required": []}, {"properties": {}}, {"minProperties": 0},
    {"patternProperties": {}}, {"minLength": 0}, {"allOf": []}, {"$comment": "x"},
    {"contentEncoding": "base64"}, {"contentMediaType": "a/b"}, {"contentSchema": {"not": {}}},
    {"readOnly": True}, {"writeOnly": True}, {"deprecated": True}, {"examples": [1]},
    {"default": [1]}, {"title": "x"}, {"description": "x"},
]  # fmt: skip


@pytest.mark.parametrize("keywords", NEUTRAL, ids=[",".join(one) for one in NEUTRAL])
def test_keywords_that_ask_nothing_are_accepted(keywords: dict[str, Any]) -> None:
    """By JSON Schema's meaning: in this schema, and within others."""
    schema = {**UNIQUE, **keywords}
    values = [[], [1, 1], ["a"], {}, {"a": 1}, 3]
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for wrapped, text in ((schema, "{}"), ({"anyOf": [{"const": 1}, schema]}, "{}")):
        before = json.dumps(wrapped)
        constraint = constrain(GRAMMARS, json=wrapped)
        for value in values:
            assert accepts(constraint, text.format(json.dumps(value))) == valid(value) or (
                value == 3 and wrapped is not schema
            )
        assert json.dumps(wrapped) == before


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True}, {"uniqueItems": 0}, {"contains": True}, {"not": True},
        {"contains": {}, "minContains": 0, "maxContains": 2}, {"minContains": 0, "contains": 3,
        "maxContains": 1}, {"if": True, "then": {"minItems": 1}}, {"if": False, "else": False},
        {"propertyNames": {"maxLength": 3}}, {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedItems": False}, {"unevaluatedProperties": {"type": "null"}},
    ],
)  # fmt: skip
def test_the_same_keywords_are_refused_where_they_ask_something(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Unimplemented.*at #/items/"):
        constrain(GRAMMARS, json={"items": {**UNIQUE, **keywords}})


REFUSED = {
    "lenient": ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "#/x-guidance"),
    "a slip": ({"items": [{"minimun": 3}]}, "#/items/0: .*'minimun'; did you mean 'minimum'"),
    "draft 3": ({"anyOf": [{"divisibleBy": 3}]}, "#/anyOf/0/divisibleBy: .*multipleOf"),
    "not": ({"properties": {"not": {"not": {}}}}, r"\(at #/properties/not/not\)"),
    "places": (
        {"$defs": {"a": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/a"}},
        r'"uniqueItems"\] \(at #/\$defs/a/uniqueItems\)',
    ),
    "names that occur twice": ({"minProperties": 2, "type": "object"}, "#/minProperties: .*<= 1"),
    "only itself": ({"$ref": "#"}, "no text can begin"),
    "a part that is only itself": (
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
        r"nothing can follow '\{\"a\":', which it allows",
    ),
    "oneOf": (
        {"items": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}},
        r"oneOf is supported for .*; write anyOf, .* \(at #/items/oneOf\)",
    ),
    "a place among others": (
        {"properties": {"a": {"minimum": 1}, "b": {"minimum": "1"}, "c": {"minimum": 1}}},
        r"Expected .* 'minimum', got \"1\" \(at #/properties/b/minimum\)",
    ),
    "a pattern": (
        {"items": {"type": "string", "pattern": "ab/(c"}},
        r"unclosed group, at character 4 of 'ab/\(c': '\(c' \(at #/items/pattern\)$",
    ),
    "a pattern of names": (
        {"patternProperties": {"a(": {}}},
        r"unclosed group, .*\(at #/patternProperties\)$",
    ),
    "a word boundary": (
        {"type": "string", "pattern": r"\ba"},
        r"word boundaries \(WordUnicode\) are not supported, in .* \(at #/pattern\)$",
    ),
    "a reference in a definition": (
        {"$defs": {"a": {"items": {"$ref": "#/nope"}}}, "items": {"$ref": "#/$defs/a"}},
        r"'/nope' does not exist \(at #/\$defs/a/items/\$ref\)$",
    ),
    "another type": ({"type": "objekt"}, r"Invalid type: objekt \(at #/type\)"),
    "nothing": (
        {"type": "string", "minLength": 3, "maxLength": 2},
        r"minLength.* \(at #/minLength\)",
    ),
    "a property that may not be": (
        {"properties": {}, "type": "object", "required": ["x"], "additionalProperties": False},
        r"'x' is unsatisfiable \(at #/required\)$",
    ),
    "many levels": (json.loads(_deep(200)), "nested too deeply: JSON may have 127 levels"),
    "a control character": ({"enum": ["a", "\x01"]}, r"#/enum: .*\\u0001"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "elsewhere": ({"$ref": "https://example.com/a.json"}, "does not fetch"),
    "a file": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_passed_over_is_refused(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s)structured_outputs: json: .*{message}"):
        constrain(GRAMMARS, json=schema)


def test_whitespace_is_what_json_allows() -> None:
    for pattern in ("[ ]?", " |\n", r"[\n ]*", "[\t ]{0,2}"):
        constrain(GRAMMARS, json={}, whitespace_pattern=pattern)
    for pattern in ("a", "( |a)", r"\s*", "/", "["):
        with pytest.raises(
            ValueError, match=r"whitespace_pattern: (.* matches more|unclosed .*'$)"
        ):
            constrain(GRAMMARS, json={}, whitespace_pattern=pattern)
    constraint = constrain(GRAMMARS, json={"const": [1, 2]}, whitespace_pattern="[ ]?")
    assert accepts(constraint, "[ 1, 2]")
    assert not accepts(constraint, "[1,  2]")


def _tag(**changes: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    part = {"begin": "<call>x", "schema": schema, "end": "</call>"}
    return {"triggers": ["<call>"], "structures": [part]} | changes


def test_tags_are_written_as_tokens_or_letter_by_letter() -> None:
    begins = [[CALL, ord("x")], list(b"<call>x")]
    ends = [[END_CALL], list(b"</call>")]
    for begin in begins:
        for end in ends:
            for value, valid in ((b'{"a":1}', True), (b'{"a":3}', False), (b"{}", False)):
                constraint = constrain(GRAMMARS, structural_tag=_tag())
                once = [*b"free", *begin, *value, *end, *b"free"]
                matcher = constraint.after(once * 2)
                if valid:
                    assert matcher is not None and matcher.is_accepting()
                    assert allowed(constraint, once * 2) >= ENDS
                else:
                    assert matcher is None
    assert accepts(constrain(GRAMMARS, structural_tag=_tag()), "free text alone </call>")


@pytest.mark.parametrize(
    "tag",
    [
        {}, [], 3, _tag(triggers=[]), _tag(triggers=[3]), _tag(triggers=["<other>"]),
        _tag(triggers=[""]), _tag(structures=[]), _tag(structures=[3]), _tag(structures={}),
        _tag(structures=[{"begin": "<call>"}]),
        _tag(structures=[{"begin": 3, "schema": {}, "end": ""}]),
        _tag(structures=[{"begin": "<call>", "schema": 3, "end": ""}]),
        _tag(structures=[{"begin": "<call>", "schema": {"not": {}}, "end": ""}]),
        _tag(structures=[{"begin": "<call>", "schema": {"minimun": 1}, "end": ""}]),
    ],
)  # fmt: skip
def test_wrong_tags_are_refused(tag: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="structur"):
        constrain(GRAMMARS, structural_tag=tag)


def test_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, made = words_grammars(), []
    compile_one = grammars._compile

    def counted(asked: StructuredOutputs) -> Any:
        made.append(asked)
        return compile_one(asked)

    monkeypatch.setattr(grammars, "_compiled", CompiledGrammars(counted))
    for _ in range(3):
        constrain(grammars, json={"type": "integer"})
        constrain(grammars, json='{"type": "integer"}')  # the same, as a text
        constrain(grammars, choice=["a"])
    assert len(made) == 2


def test_threads_compile_at_the_same_time() -> None:
    grammars = words_grammars()  # its tokenizer is read by the first one

    def compile_one(number: int) -> bool:
        return accepts(constrain(grammars, choice=[f"a{number % 8}", "b"]), f"a{number % 8}")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compile_one, range(64)))


def test_other_threads_go_on_while_one_compiles() -> None:
    """An engine's step waits for a small part of the work at most, as the lock is not held."""
    grammars = words_grammars()
    constrain(grammars, choice=["a"])  # reads the vocabulary
    clocks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def compile_one() -> None:
        clocks.put(time.pthread_getcpuclockid(threading.get_ident()))
        begin.wait()
        constrain(grammars, regex="(a{1000}){40}")
        compiled.set()
        end.wait()  # the clock ends with its thread

    begin, compiled, end = threading.Event(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_one)
        clock = clocks.get()
        work = [time.clock_gettime(clock)]  # of the compiling thread, at each turn of this one
        begin.set()
        while not compiled.wait(0.001):
            work.append(time.clock_gettime(clock))
        work.append(time.clock_gettime(clock))
        end.set()
        compiling.result()
    parts = [after - before for before, after in itertools.pairwise(work)]
    assert max(parts) < 0.2 * sum(parts), sorted(parts)[-5:]


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    class Slow:
        backend_tokenizer = None

    for tokenizer, message in ((None, "no tokenizer"), (Slow(), "tokenizer.json")):
        with pytest.raises(ValueError, match=message):
            constrain(Grammars(tokenizer, SIZE), regex="a")


def _doubling(depth: int) -> dict[str, Any]:
    """A schema of which each definition has the next one twice."""
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "maxItems": i} for i in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {"type": "integer"}}}


BOMBS: dict[str, dict[str, Any]] = {
    "deep schema": dict(json=_deep(400)),
    "doubling": dict(json=_doubling(40)),
    "allOf of anyOf": dict(
        json={"allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}]} for i in range(40)]}
    ),
    "megabyte of properties": dict(
        json={"properties": {f"name{i}": {"type": "string"} for i in range(30000)}}
    ),
    "megabyte of enum": dict(json={"enum": [f"value number {i}" for i in range(50000)]}),
    "megabyte of choices": dict(choice=[f"value number {i}" for i in range(50000)]),
    "long pattern": dict(regex="(a|b|cd)" * 20000),
    "counted": dict(regex="(((a{1,1000}){1,1000}){1,1000})"),
    "counted string": dict(json={"type": "string", "minLength": 10**6, "maxLength": 10**7}),
    "ambiguous": dict(regex="(a*)*(a|aa)+" * 10 + "b"),
    "determinized": dict(regex="(.*a.{20}){3}"),
    "many items": dict(json={"items": {"type": "integer"}, "minItems": 10**5}),
    "nested counts": dict(
        json={"items": {"items": {"items": {"maxItems": 999}, "maxItems": 999}, "maxItems": 999}}
    ),
    "left recursion": dict(grammar='start: start start | "a" | start'),
    "nothing ends": dict(grammar='start: "a" start'),
    **{
        f"{name} {number}": one
        for number in (1000, 100_000)
        for name, one in {
            "many rules": dict(
                grammar="\n".join(f'r{i}: "a" r{i + 1}?' for i in range(number - 2))
                + f'\nr{number - 2}: "b"\nstart: r0'
            ),
            "many terminals": dict(
                grammar="\n".join(f'A{i}: "a" A{i + 1}' for i in range(number - 2))
                + f'\nA{number - 2}: "b"\nstart: A0'
            ),
            "GBNF": dict(grammar="root ::= " + "(" * number + '"a"' + ")" * number),
            "references": dict(
                json={"$ref": "#/$defs/0", "$defs": {
                    **{str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(number // 3)},
                    str(number // 3): {"type": "integer"},
                }}
            ),
            "references elsewhere": dict(
                json={"$ref": "#/properties/0", "properties": {
                    **{str(i): {"items": {"$ref": f"#/properties/{i + 1}"}}
                       for i in range(number // 4)},
                    str(number // 4): {"type": "integer"},
                }}
            ),
            "references of properties": dict(
                json={"$ref": "#/$defs/0", "$defs": {
                    **{str(i): {"properties": {"a": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]}}}
                       for i in range(number // 6)},
                    str(number // 6): {"type": "integer"},
                }}
            ),
        }.items()
    },
    "JSON": dict(grammar='{"grammars": [{"lark_grammar": "start: start"}]}'),
    "long multiple": dict(json={"type": "integer", "multipleOf": 982451653}),
    "wide range": dict(json={"type": "number", "minimum": -1e300, "maximum": 1e-300}),
}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        dict(regex="(a{1000}){1000}"), dict(regex="(((a{1,1000}){1,1000}){1,1000})"),
        dict(choice=["ab" * 200_000, "ba" * 200_000]),
        dict(json={"type": "string", "pattern": "^(a{1000}){1000}$"}),
        dict(grammar="start: /b|(a{1000}){1000}/"),
    ],
)  # fmt: skip
def test_what_needs_too_many_states_is_refused_at_once(asked: dict[str, Any]) -> None:
    """And sooner the second time."""
    with pytest.raises(ValueError, match="it is too complex: lexer error: too many expressions"):
        constrain(GRAMMARS, **asked)
    with little_work(0.1), pytest.raises(ValueError, match="it is too complex"):
        constrain(GRAMMARS, **asked)


def test_the_trial_of_a_grammar_leaves_no_trace() -> None:
    """Grammars that end sooner than it, or allow ends only, compile; none has begun then."""
    for asked in (
        dict(regex="a?"),
        dict(regex="a{40}"),
        dict(choice=["a"]),
        dict(json_object=True),
    ):
        constraint = constrain(words_grammars(), **asked)
        assert constraint.update(sequence_of([])) is None
        assert allowed(constraint) >= ({ord("a")} if "json_object" not in asked else {ord("{")})


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_or_compile_in_time(name: str) -> None:
    with little_work(20), contextlib.suppress(ValueError):
        allowed(constrain(GRAMMARS, **BOMBS[name]))


def broken(rng: random.Random) -> dict[str, Any]:
    """A schema, pattern or grammar in which something is cut out, doubled or replaced."""
    kind, text = rng.choice(
        [
            ("json", json.dumps({"type": "object", "properties": {"a": {"pattern": "^(a|b)+$"}},
                                 "required": ["a"], "anyOf": [{"$ref": "#/properties/a"}]})),
            ("regex", r"(?i)[a-z]{2,3}(\d+|x)*\.(com|org)"),
            ("grammar", 'start: a b+\na: "x" | /[0-9]+/\nb: %json {"type": "integer"} a?'),
        ]
    )  # fmt: skip
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(text)), rng.randrange(6)
        new = rng.choice(["", text[at : at + length] * 2, rng.choice('{}[]()"\\|*+?:%#/,\0é')])
        text = text[:at] + new + text[at + length :]
    return {kind: text}


def test_broken_input_is_refused_or_compiles() -> None:
    rng = random.Random(5)
    for _ in range(200):
        asked = broken(rng)
        with little_work(2), contextlib.suppress(TypeError, ValueError):
            allowed(constrain(GRAMMARS, **asked))


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_tokens_keep_their_ids_when_no_text_contains_them(kind: str) -> None:
    """Added tokens may be in the model's vocabulary, or behind it, where lists have no room."""
    texts = ["<unk>", "<s>", "a", "b", "<", "s", ">", "ab", "<in>", "</s>"]
    model: Any = (
        models.BPE({text: i for i, text in enumerate(texts)}, [("a", "b")], unk_token="<unk>")
        if kind == "BPE"
        else models.Unigram([(text, i - 20.0) for i, text in enumerate(texts)], unk_id=0)
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<in>", "</s>", "<new>")])
    described = described_tokenizer(tokenizer, [9])
    hidden = Tokenizer.from_str(json.dumps(described))
    assert {text.strip("\ufdd0"): i for text, i in hidden.get_vocab().items()} == (
        tokenizer.get_vocab()
    )
    special = {*range(2), 9} | ({10} if kind == "Unigram" else set())
    assert {token["id"] for token in described["added_tokens"]} == special
    assert {i for text, i in hidden.get_vocab().items() if text.startswith("\ufdd0")} == special
    assert tokenizer.encode("ab<s>a").ids == [7, 1, 2]
    assert hidden.encode("ab<s>a").ids == [7, 4, 5, 6, 2]
    assert hidden.encode("abba").ids == tokenizer.encode("abba").ids


def test_an_added_token_whose_text_is_normalized_is_not_text() -> None:
    """A normalizer that puts a space in front of texts does so with the token's: it has another."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    vocab |= {"\u2581": 256, **{text: 257 + i for i, text in enumerate("ABC<think>")}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=True)])
    tokenizer.add_tokens([AddedToken("<call>", special=False, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = [tokenizer.token_to_id(text) for text in ("<think>", "<call>")]
    assert wrapped.decode([ids[0]]) == " <think>"
    size = tokenizer.get_vocab_size()
    grammars = Grammars(wrapped, size)
    for text, is_text in (("<think>", False), (" <think>", False), ("<call>", True)):
        constraint = constrain(grammars, regex=f"({text}|B)C")
        found = allowed(constraint, (), size)
        assert (ids[is_text] in found) == is_text, text


def test_added_tokens_are_text_unless_they_are_special_or_end_outputs() -> None:
    texts = ["<think>", "<|a|>", "[CALL]", "<x y>", "<日 本>", "abc", " x"]
    tokenizer = words_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in [*texts, "</s>"]])
    vocab: dict[str, int] = tokenizer.get_vocab()
    grammars = Grammars(tokenizer, len(vocab), (EOS, vocab["</s>"]))
    for text in texts:
        for change in (-1, 0, 1):
            found = allowed(constrain(grammars, regex=f".{{{len(text) + change}}}"), (), len(vocab))
            assert (vocab[text] in found) == (change >= 0), text
        assert accepts(constrain(grammars, choice=[text]), text)
    for text in ("</s>", "<|special|>"):
        for change in (-1, 0, 1):
            found = allowed(constrain(grammars, regex=f".{{{len(text) + change}}}"), (), len(vocab))
            assert vocab[text] not in found
        assert accepts(constrain(grammars, choice=[text]), text)
