"""Long JSON is parsed in pieces, and the same values, or errors, come out."""

import json
import random
import re
from typing import Any

import pytest

from nanovllm.server import long_json
from nanovllm.server.limits import COST
from nanovllm.server.long_json import TooManyValuesError, parse_long
from nanovllm.utils.json_text import parse_json

MANY = 1 << 30
TEXTS = (
    "", "a", "b" * 40, "\\", "\\\\", '"', '\\"', "\n\t", "é", "中文" * 9, "\U0001f600" * 5, ",",
    "[{", "]}", "a,b", "\ud83d",
    "x" * 13 + "\\", '"' * 20, "\\" * 31, "\x00", "\U0001f600\ud83d" * 4,
)  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth > 3 else 8)
    if kind < 4:
        return rng.choice([rng.choice(TEXTS), rng.choice(TEXTS), 17, -1.5e3, True, None])
    number = rng.randrange(6)
    if kind < 6:
        return [odd_value(rng, depth + 1) for _ in range(number)]
    return {f"{rng.choice('abc,')}{place}": odd_value(rng, depth + 1) for place in range(number)}


def written(rng: random.Random, value: Any) -> bytes:
    indent, ascii_only = rng.choice([None, None, 1]), rng.random() < 0.5
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    return text.encode(errors="replace")


@pytest.mark.parametrize("size", [64, 80, 100])
def test_pieces_make_the_same_value(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "PIECE", size)
    rng = random.Random(size)
    for _ in range(700):
        value = {"a": odd_value(rng), "b": [odd_value(rng), odd_value(rng)], "c": odd_value(rng)}
        data = written(rng, value)
        assert parse_long(data, MANY, 99) == parse_json(data.decode()), data


def test_damaged_data_is_an_error_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "PIECE", 64)
    rng, errors = random.Random(1), 0
    for _ in range(2000):
        data = bytearray(written(rng, {"a": odd_value(rng), "b": odd_value(rng)}))
        for _ in range(rng.randrange(1, 3)):
            place = rng.randrange(len(data))
            data[place : place + rng.randrange(2)] = rng.choice(
                [b",", b'"', b"[", b"]", b"{", b"}", b"\\", b":", b"1", b" ", b"\xe9"]
            )
        expected = None
        try:
            expected = parse_json(data.decode())
            is_object = isinstance(expected, dict)
        except ValueError:
            is_object, errors = False, errors + 1
        try:
            assert parse_long(bytes(data), MANY, 99) == expected and is_object, data
        except ValueError:
            assert not is_object, data
    assert errors > 500


def test_values_are_counted_outside_of_texts() -> None:
    cases = {
        '{"a": [1, 2, 3], "b": ",[{,"}': 2 * COST + 4,
        '["\\"", ",", "\\\\", {}]': 2 * COST + 4,
        '"' + "," * 100 + '"': 1,
        "17": 1,
    }
    for text, number in cases.items():
        assert parse_long(text.encode(), number, 9) == json.loads(text)
        with pytest.raises(TooManyValuesError):
            parse_long(text.encode(), number - 1, 9)


def test_nesting_has_a_limit() -> None:
    assert parse_long(b"[" * 9 + b"]" * 9, MANY, 9) == [[[[[[[[[]]]]]]]]]
    for data in (b"[" * 10 + b"]" * 10, b"[" * 1_000_000, b'{"a":' * 1_000_000):
        with pytest.raises(ValueError, match=r"at most 9 lists and objects .*\(max_body_depth\)"):
            parse_long(data, MANY, 9)


BODIES = {
    "numbers": b'{"a": [' + b"1," * 400_000 + b"1]}",
    "a text": b'{"a": "' + b"\\n\\u00e9" * 200_000 + b'", "b": 1}',
    "messages": b"[" + b",".join([b'{"role": "user", "content": "a"}'] * 30_000) + b"]",
    "biases": b"{" + b",".join(b'"%d": 1' % number for number in range(100_000)) + b"}",
    "long numbers": b'{"a": [' + b",".join([b"9" * 4000] * 300) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_little_is_parsed_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the parser is one that keeps other threads waiting."""
    parsed: list[int] = []

    def parse(text: str) -> Any:
        parsed.append(len(text))
        return parse_json(text)

    monkeypatch.setattr(long_json, "parse_json", parse)
    data = BODIES[name]
    assert parse_long(data, MANY, 9) == json.loads(data)
    assert max(parsed) < 1.01 * long_json.PIECE
    assert len(data) / long_json.PIECE <= len(parsed) < 2 + 1.1 * len(data) / long_json.PIECE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" + b" " * 200_000 + b"1]", "65536 bytes without a comma or a text"),
        (b'{"a": 1, "b": ["' + b"x" * 200_000 + b'"], "a": 2}', "'a' occurs twice"),
        (b"[1], " * 30_000, "Extra data"),
        (b'"' + b"x" * 200_000 + b'"', "it must be one object"),
        (b"[" + b"1, " * 50_000 + b"]", "Expecting value near byte 150001"),
        (b"[" + b"1," * 32_767 + b" ]", "a value is missing before byte 65535"),
        (b"[," + b" " * 65_533 + b"1]", "a value is missing before byte 2"),
        (b"[" + b"1, " * 50_000 + b"x, 1]", "Expecting value near byte 150001"),
        (b"[" + b"1, " * 50_000 + b"1", "Expecting ',' delimiter near byte 150002"),
        (b"[" + b"1, " * 50_000 + b"}", "'}' closes nothing"),
        (b'["' + b"x" * 200_000, "Unterminated string"),
    ],
)
def test_errors_say_where(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_long(data, MANY, 9)
