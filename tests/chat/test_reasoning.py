"""Reasoning in answers: where it begins and ends, and that cuts change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.chat.reasoning import Reasoning, ReasoningReader, reasoning_of

# An answer, whether it begins inside, its reasoning, the rest.
ANSWERS = [
    ("<think>\nSo.\n</think>\n\nYes.\n", False, "So.", "Yes.\n"),
    ("So. \n</think>Yes.", True, "So.", "Yes."),
    (" \n<think></think>", False, "", ""),
    ("<think>So", False, "So", ""),
    ("So </think", True, "So </think", ""),
    ("So \n ", True, "So", ""),
    ("Yes. </think> no", False, "", "Yes. </think> no"),
    ("  Yes", False, "", "  Yes"),
    ("<thin", False, "", "<thin"),
    ("<thinking>", False, "", "<thinking>"),
    ("", True, "", ""),
    ("<think>a</think>b</think> c<think>", False, "a", "b</think> c<think>"),
    ("a  b </think >c</think>", True, "a  b </think >c", ""),
    (" <think> a</think> b", True, "a", "b"),
    ("<think", True, "<think", ""),
]


def divide(pieces: list[str], inside: bool) -> tuple[str, str]:
    reader = ReasoningReader(inside)
    parts = [*map(reader.feed, pieces), reader.feed("", ended=True)]
    return "".join(p.reasoning for p in parts), "".join(p.rest for p in parts)


@pytest.mark.parametrize(("text", "inside", "reasoning", "rest"), ANSWERS)
def test_reasoning_is_divided(text: str, inside: bool, reasoning: str, rest: str) -> None:
    assert divide([text], inside) == (reasoning, rest)
    assert divide(list(text), inside) == (reasoning, rest)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a"])),
    st.booleans(),
    st.data(),
)
def test_cuts_change_nothing(parts: list[str], inside: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert divide(pieces, inside) == divide([text], inside)


def test_reasoning_is_reported_as_it_comes() -> None:
    reader = ReasoningReader(inside=True)
    pieces = [reader.feed(char).reasoning for char in "So, yes <"]
    assert pieces == ["S", "o", ",", "", " y", "e", "s", "", ""]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("begin", ["", "<think>a", "<think>a</think>", "b"])
@pytest.mark.parametrize("piece", [" ", "\n\t ", "< "])
def test_a_piece_is_looked_at_once(begin: str, piece: str, inside: bool) -> None:
    """What is looked at again with the next piece is at most the first part of a marker."""
    reader = ReasoningReader(inside)
    reader.feed(begin)
    for _ in range(100):
        reader.feed(piece)
        assert len(reader._held) < len("</think>")
    whole = begin + piece * 100 + "x"
    assert divide([begin, *[piece] * 100, "x"], inside) == divide([whole], inside)


@pytest.mark.parametrize(
    ("template", "prompt", "parser", "expected"),
    [
        ("plain", "user: Hi", None, None),
        ("enable_thinking <think></think>", "assistant\n", None, Reasoning(False, True)),
        ("enable_thinking <think></think>", "<think>\n\n</think>\n\n", None, Reasoning(over=True)),
        ("</think>", "assistant\n", None, Reasoning()),
        ("</think>", "assistant\n<think>\n", None, Reasoning(True, True)),
        ("plain", "assistant\n", "qwen3", Reasoning(False, True)),
        ("plain", "assistant\n", "deepseek_r1", Reasoning(True, True)),
        ("enable_thinking </think>", "assistant\n<think>\n", "none", None),
    ],
)
def test_template_prompt_and_name_decide(
    template: str, prompt: str, parser: str | None, expected: Reasoning | None
) -> None:
    assert reasoning_of(template, prompt, parser) == expected
