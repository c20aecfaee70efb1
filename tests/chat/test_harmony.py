"""Answers in harmony: what is reasoning, content and a call, and that cuts change nothing."""

import bisect
import itertools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.chat.answers import AnswerFormat
from nanovllm.chat.harmony.marked_text import MARKERS, MarkedText, Piece, special_tokens
from nanovllm.chat.harmony.opening import Opening, opening_of
from nanovllm.chat.harmony.turns import HarmonyAnswer
from nanovllm.engine.requests.detokenizer import Detokenizer
from tests.chat.harmony_words import TOKENIZER, answer_of, tokens_of

SPECIAL = special_tokens(TOKENIZER)
A, C, F = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
Found = tuple[str | None, str | None, list[tuple[str, str]]]


def answer_format(
    opening: Opening | None = None, reads_calls: bool = True, reasons: bool = True
) -> AnswerFormat:
    opening = Opening() if opening is None else opening
    return AnswerFormat(harmony=HarmonyAnswer(TOKENIZER, SPECIAL, opening, reads_calls, reasons))


def parts_of(message: dict[str, Any]) -> Found:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    found = [(call["name"], call["arguments"]) for call in calls]
    return message.get("reasoning_content"), message.get("content"), found


def text_of(ids: list[int]) -> str:
    """The text as outputs have it: without a token that ends the output."""
    ends = [TOKENIZER.convert_tokens_to_ids(end) for end in ("<|return|>", "<|call|>")]
    shown = ids[:-1] if ids and ids[-1] in ends else ids
    return str(TOKENIZER.decode(shown, skip_special_tokens=False))


def read(answer: str, **options: Any) -> Found:
    """What a whole answer has."""
    ids = tokens_of(answer)
    return parts_of(answer_format(**options).message(text_of(ids), ids))


def streamed(pieces: list[tuple[str, list[int]]], **options: Any) -> Found:
    """What the deltas of an answer add up to."""
    reader = answer_format(**options).reader()
    whole: dict[str, Any] = {}
    calls: dict[int, list[str]] = {}
    ends = [False] * len(pieces) + [True]
    for (text, ids), ended in zip([*pieces, ("", [])], ends, strict=True):
        delta = reader.feed(text, ended, ids)
        for name in ("reasoning_content", "content"):
            if name in delta:
                assert delta[name]
                whole[name] = whole.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    found = [(name, arguments) for name, arguments in calls.values()]
    return whole.get("reasoning_content"), whole.get("content"), found


ANSWERS: list[tuple[str, Found]] = [
    (f"{A}Hm.<|end|><|start|>assistant{F}Yes.<|return|>", ("Hm.", "Yes.", [])),
    (f"{F}Yes.<|return|>", (None, "Yes.", [])),
    (answer_of(f"{A}Hm.", f"{CALL}<|call|>"), ("Hm.", None, [("f", '{"a": 1}')])),
    (
        answer_of(f"{A}Hm.", f"{C}I look it up.", f"{CALL}<|call|>"),
        ("Hm.", "I look it up.", [("f", '{"a": 1}')]),
    ),
    (answer_of(CALL, f"{CALL}<|call|>"), (None, None, [("f", '{"a": 1}')] * 2)),
    (f"{CALL}<|call|><|start|>assistant{CALL}", (None, None, [("f", '{"a": 1}')] * 2)),
    (answer_of(f"{A}a", f"{A}b", f"{C}c", f"{F}d<|return|>"), ("a\n\nb", "c\n\nd", [])),
    # Other ways to write headers.
    (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        (None, None, [("f", '{"a": 1}')]),
    ),
    (
        '<|channel|>commentary to=f<|constrain|>json<|message|>\n{"a": 1}\n<|call|>',
        (None, None, [("f", '{"a": 1}')]),
    ),
    (
        '<|channel|>analysis to=browser.search code<|message|>{"q": "x"}<|call|>',
        (None, None, [("browser.search", '{"q": "x"}')]),
    ),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", (None, None, [("f", "{}")])),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", (None, "{}", [])),
    ("<|channel|>commentary<|channel|>analysis<|message|>a", ("a", None, [])),
    (
        '<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        (None, None, [("f", '{"a": 1}')]),
    ),
    ("<|channel|>commentary to=assistant<|message|>a<|return|>", (None, "a", [])),
    (f"{A}a<|end|>assistant{F}b", ("a", "b", [])),
    (f"{A}a{F}b<|return|>", ("a", "b", [])),
    (f"{A}a<|start|>assistant{F}b<|return|>", ("a", "b", [])),
    (f"<|start|>assistant{A}a<|end|>", ("a", None, [])),
    ("<|message|>No channel.<|return|>", (None, "No channel.", [])),
    ("<|channel|>other<|message|>Yes.<|return|>", (None, "Yes.", [])),
    (
        f'{A}a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"r"<|end|>'
        f"<|start|>assistant{F}b<|return|>",
        ('a\n\n"r"', "b", []),
    ),
    # Text that has no header.
    ("Just text.", (None, "Just text.", [])),
    (f"Text, {F}and more.", (None, "Text, \n\nand more.", [])),
    ("<|channel|>final Hello, you.<|return|>", (None, "Hello, you.", [])),
    (f"{F}{'a' * 400}<|end|>{'b' * 400}", (None, f"{'a' * 400}\n\n{'b' * 400}", [])),
    (f"<|channel|>analysis {'b' * 400}", ("b" * 400, None, [])),
    (f"<|channel|>analysis{' ' * 400}b", (" " * (400 - 249) + "b", None, [])),
    # Text that looks like a marker.
    (
        f"{A}a !<|end|>!<|start|>assistant!<|channel|>final!<|message|> b<|end|>",
        (f"a <|end|><|start|>assistant{F} b", None, []),
    ),
    (f"{F}é !<|call|> 日!<|return|><|return|>", (None, "é <|call|> 日<|return|>", [])),
    (
        '<|channel|>commentary to=functions.f<|message|>{"a": "!<|call|>"}<|call|>',
        (None, None, [("f", '{"a": "<|call|>"}')]),
    ),
    (f"{F}a<|message|>b<|constrain|>c<|special|>d", (None, "abcd", [])),
    # Answers that are cut.
    ("", (None, "", [])),
    ("<|channel|>", (None, "", [])),
    ("<|channel|>ana", (None, "", [])),
    (" to=functions.f", (None, "", [])),
    (f"{A}Hm", ("Hm", None, [])),
    (f"{A}Hm.<|end|><|start|>assi", ("Hm.", None, [])),
    (f"{A}Hm.<|end|><|start|>assistant<|channel|>fi", ("Hm.", None, [])),
    (CALL, (None, None, [("f", '{"a": 1}')])),
    (CALL[:-1], (None, CALL[:-1], [])),
    (CALL[: CALL.index("{")], (None, CALL[: CALL.index("{")], [])),
    # Calls that are none.
    (CALL.replace("1", "01") + "<|call|>", (None, CALL.replace("1", "01"), [])),
    (CALL.replace('{"a": 1}', "[1]") + "<|call|>", (None, CALL.replace('{"a": 1}', "[1]"), [])),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("print(1)", None, [])),
    (f"{CALL} Done.<|call|>", (None, "Done.", [("f", '{"a": 1}')])),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_an_answer_is_divided(answer: str, expected: Found) -> None:
    assert read(answer) == expected


def all_cuts(ids: list[int], text: str, cuts: list[int], ahead: int = 0) -> list[Any]:
    """The text divided at `cuts`, each piece with the tokens that it has text of.

    Tokens may also come up to `ahead` characters before their text.
    """
    starts, place = [], 0
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False)
    for token_id in ids:
        starts.append(place)
        place += len(detokenizer.add(token_id))
    places = [0, *cuts, len(text)]
    pieces, given = [], 0
    for begin, end in itertools.pairwise(places):
        number = bisect.bisect_left(starts, end + ahead)
        if end == len(text):
            number = len(ids)
        pieces.append((text[begin:end], ids[given:number]))
        given = max(given, number)
    return pieces


def is_cut_call(whole: Found, early: Found) -> bool:
    """Whether the streams have calls that the whole answer has not: their ends are missing."""
    return len(early[2]) > len(whole[2])


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_streams_are_the_same_for_every_cut(answer: str, expected: Found) -> None:
    ids = tokens_of(answer)
    text = text_of(ids)
    first = streamed([(text, ids)])
    if not is_cut_call(expected, first):
        reasoning, content, calls = expected
        assert first == (reasoning, content or None, calls)
    every = range(len(text) + 1) if len(text) < 200 else [0, 3, 20, 150, len(text)]
    for cut in every:
        assert streamed(all_cuts(ids, text, [cut])) == first
    assert streamed(all_cuts(ids, text, [*range(len(text) + 1)])) == first
    assert streamed(all_cuts(ids, text, [*range(len(text) + 1)], ahead=30)) == first


WORDS = [
    *MARKERS, *(f"!{marker}" for marker in MARKERS), "<|special|>", A, C, F, CALL,
    f"{CALL}<|call|>", "assistant", "analysis", "commentary", "final", " to=functions.f",
    " to=assistant", " to=", " json", "{", "}", '{"a": ', '"', "\\", "1", " ", "\n", "x", "é", "日",
    "<|", "functions.f", "x" * 300, " " * 130, '{"a": {}}',
]  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    st.data(),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
)
def test_cuts_change_nothing(
    answer: str, data: st.DataObject, ahead: int, reads_calls: bool, reasons: bool
) -> None:
    """Also for answers that are not well-formed; nothing of their bodies is lost."""
    options: Any = dict(reads_calls=reads_calls, reasons=reasons)
    ids = tokens_of(answer)
    text = text_of(ids)
    first = streamed([(text, ids)], **options)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    assert streamed(all_cuts(ids, text, cuts, ahead), **options) == first
    assert streamed(all_cuts(ids, text, [*range(len(text))]), **options) == first
    reasoning, content, calls = read(answer, **options)
    if not is_cut_call((reasoning, content, calls), first):
        assert (reasoning, content or None, calls) == first
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert reads_calls or not calls
    assert reasons or reasoning is None


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1) | st.sampled_from(sorted(SPECIAL)), max_size=20),
    st.data(),
)
def test_any_tokens_are_divided_at_special_ones(ids: list[int], data: st.DataObject) -> None:
    """As the engine makes their text, also if they are no text that a tokenizer makes."""
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False)
    marked, found, held = MarkedText(TOKENIZER, SPECIAL), list[Piece](), ""
    for token_id in ids:
        held += detokenizer.add(token_id)
        number = data.draw(st.integers(0, len(held)))
        found += marked.feed(held[:number], [token_id])
        held = held[number:]
    found += marked.feed(held + detokenizer.finish(), [], ended=True)
    assert "".join(piece.text for piece in found) == TOKENIZER.decode(ids)
    assert [p.text for p in found if p.is_marker] == [SPECIAL[i] for i in ids if i in SPECIAL]


def test_a_stop_string_cuts_the_text_and_not_the_tokens() -> None:
    """The tokens of the stop, and those after it in the same step, have no text."""
    ids = tokens_of(f"{A}Hm. stop<|end|><|start|>assistant{F}x")
    for end in ("Hm. ", "Hm", ""):
        message = answer_format().message(f"{A}{end}", ids)
        assert message.get("reasoning_content") == (end or None), "no text of the rest"
    assert answer_format().message("<|channel|>ana", ids)["content"] == ""
    assert answer_format().message("<|chan", ids)["content"] == ""


def test_text_without_tokens_is_tokenized() -> None:
    message = answer_format().message(answer_of(f"{A}a", f"{F}b"))
    assert parts_of(message) == ("a", "b", [])


def test_parts_come_as_soon_as_they_are_certain() -> None:
    answer = answer_of(f"{A}Hm", f"{CALL.replace('1', '[5, 6]')}", f"{F}Yes")
    reader, seen = answer_format().reader(), list[str]()
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=False)
    for token_id in tokens_of(answer):
        delta = reader.feed(detokenizer.add(token_id), False, [token_id])
        calls = delta.pop("tool_calls", ())
        seen += [one["function"].get("name", "") + one["function"]["arguments"] for one in calls]
        seen += delta.values()
    assert seen == ["H", "m", "f{", *'"a": [', "5,", " ", "6]", "}", *"Yes"]


@pytest.mark.parametrize(
    ("prompt", "place", "answer", "expected"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", "header", F + "a", (None, "a", [])),
        ("<|start|>user<|message|>Hi<|end|>", "start", f"<|start|>assistant{A}a", ("a", None, [])),
        (f"<|start|>assistant{F}Yes, ", "final", "a<|return|>", (None, "a", [])),
        (f"<|start|>assistant{A}Hm, ", "other", f"a<|end|><|start|>assistant{F}b", ("a", "b", [])),
        ("<|start|>assistant<|channel|>", "", "analysis<|message|>a", ("a", None, [])),
        (f"<|start|>assistant{CALL[:-1]}", "other", "}", (None, "}", [])),
        ("Hi", "header", "Yes", (None, "Yes", [])),
    ],
)  # fmt: skip
def test_an_answer_goes_on_where_the_prompt_ends(
    prompt: str, place: str, answer: str, expected: Found
) -> None:
    opening = opening_of(TOKENIZER, SPECIAL, tokens_of(prompt))
    assert opening.place == place
    assert read(answer, opening=opening) == expected


def test_a_tokenizer_without_the_markers_is_refused() -> None:
    from tests.grammar_words import words_tokenizer

    with pytest.raises(ValueError, match=re.escape("has no token '<|start|>'")):
        special_tokens(words_tokenizer())


def test_reasoning_and_calls_may_stay_content() -> None:
    answer = answer_of(f"{A}a", f"{CALL}<|call|>")
    assert read(answer, reasons=False) == (None, "a", [("f", '{"a": 1}')])
    assert read(answer, reads_calls=False) == ("a", CALL, [])


@pytest.mark.slow
def test_the_time_is_linear_in_the_length() -> None:
    """A quadratic one would be 256 times as long for 16 times the tokens."""

    def seconds(ids: list[int], is_whole: bool) -> float:
        text = text_of(ids)
        pieces = [(text, ids)] if is_whole else all_cuts(ids, text, [*range(0, len(text), 3)], 0)
        begin = time.thread_time()
        streamed(pieces)
        return time.thread_time() - begin

    for unit in (*MARKERS, f"{A}a b", CALL, "a ", "<|channel|> a", "<|channel|>final<|message|>x"):
        ids = tokens_of(unit)
        for is_whole in (True, False):
            short, long = (ids * (number // len(ids)) for number in (1_000, 16_000))
            least = max(seconds(short, is_whole), 0.004)
            assert seconds(long, is_whole) < 80 * least, unit
