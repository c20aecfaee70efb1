"""JSON Schema's own test suite, draft 2020-12: what is supported, what is refused.

No invalid instance may pass. Valid ones may be refused where the output has one way to be written.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from nanovllm import StructuredOutputs
from nanovllm.structured.constraint import GrammarConstraint
from tests.grammar_words import accepts, words_grammars

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.jsonl"
CASES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in SUITE.read_text(encoding="utf-8").splitlines():
    case = json.loads(line)
    CASES[case["file"].removesuffix(".json")].append(case)
GRAMMARS = words_grammars()

# Files in which every schema is supported, and those in which every one is refused. In the others
# the refused ones use keywords of the second kind, are false, or see PARTLY.
SUPPORTED = {
    "anchor", "content", "default", "exclusiveMaximum", "exclusiveMinimum",
    "infinite-loop-detection", "items", "maximum", "minimum", "pattern", "prefixItems",
    "properties", "required", "type",
    *(f"optional/{name}" for name in (
        "anchor", "float-overflow", "id", "no-schema", "non-bmp-regex", "refOfUnknownKeyword",
    )),
    *(f"optional/format/{name}" for name in (
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    )),
}  # fmt: skip
REFUSED = {
    "contains", "defs", "dependentRequired", "dependentSchemas", "dynamicRef", "refRemote",
    "vocabulary",
    *(f"optional/{name}" for name in (
        "cross-draft", "dependencies-compatibility", "dynamicRef", "format-assertion",
        "unknownKeyword",
    )),
    *(f"optional/format/{name}" for name in (
        "ecmascript-regex", "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer",
        "regex", "relative-json-pointer", "uri-reference", "uri-template",
    )),
}  # fmt: skip
# Invalid instances that pass: these formats are patterns, which know no calendar.
LOOSE = {
    "optional/format/date": ['"2021-02-29"'] * 2,
    "optional/format/date-time": ['"1998-12-31T23:58:60Z"', '"1998-12-31T22:59:60Z"'],
    "optional/format/time": [
        f'"{time}"'
        for time in (
            "22:59:60Z", "23:58:60Z", "22:59:60+00:00", "23:58:60+00:00", "23:59:60+01:00",
            "23:59:60+00:30", "23:59:60-01:00", "23:59:60-00:30", "22:59:60Z", "23:58:60Z",
        )
    ],
}  # fmt: skip
# Valid instances that do not pass.
STRICT = {
    # Names come in the order of `properties`, those that are not there after them.
    "allOf": ['{"foo":"baz","bar":2}', '{"foo":"quux","bar":2,"baz":null}'],
    # Values are written in one way.
    "const": ['{"baz":"bax","foo":"bar"}', "0.0", "1.0", "-2.0", "9007199254740992.0"],
    "enum": ["0.0", "[0.0]", "1.0", "[1.0]"],
    "type": ["1.0"],
    "optional/float-overflow": ["1e+308"],
    # A format is asserted.
    "format": [
        f'"{text}"'
        for text in (
            "2962", "127.0.0.0.1", "12345::", "-a-host-name-that-starts-with--", "06/19/1963",
            "1990-02-31T15:59:60.123-08:00", "08:30:06 PST", "//foo.bar/?baz=qux#quux",
            "2eb8aa08-aa98-11ea-b4aa-73b441d1638", "PT1D",
        )
    ],
    "optional/ecmascript-regex": [
        '"\\u0001"', '"\\u000b"',  # of control characters \\b, \\f, \\n, \\r and \\t
    ],
    # Forms that are seldom used.
    "optional/format/email": [
        r'"\"joe bloggs\"@example.com"', r'"\"joe..bloggs\"@example.com"',
        r'"\"joe@bloggs\"@example.com"', '"joe.bloggs@[IPv6:::1]"',
    ],
    "optional/format/ipv6": [
        f'"{text}"'
        for text in (
            "1::d6:192.168.0.1", "1:2::192.168.0.1", "::ffff:192.168.0.1",
            "1000:1000:1000:1000:1000:1000:255.255.255.255",
        )
    ],
}  # fmt: skip


def _compile(schema: Any) -> GrammarConstraint | None:
    try:
        return GRAMMARS.constraint(StructuredOutputs(json=schema))
    except ValueError:
        return None


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_suite(name: str) -> None:
    accepted, rejected, refused = [], [], []
    for case in CASES[name]:
        constraint = _compile(case["schema"])
        if constraint is None:
            refused.append(case["about"])
            continue
        for data, valid in case["tests"]:
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            if accepts(constraint, text) != valid:
                (rejected if valid else accepted).append(text)
    assert Counter(accepted) == Counter(LOOSE.get(name, []))
    assert Counter(rejected) == Counter(STRICT.get(name, []))
    if name in SUPPORTED:
        assert refused == []
    elif name in REFUSED:
        assert len(refused) == len(CASES[name])
    else:
        assert 0 < len(refused) < len(CASES[name]), refused


def test_all_lists_are_of_the_suite() -> None:
    assert not SUPPORTED & REFUSED
    assert {*CASES} >= SUPPORTED | REFUSED | {*LOOSE} | {*STRICT}
