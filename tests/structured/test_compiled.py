"""Compiled grammars: which are kept, and when one is compiled again for other constraints."""

import time
from typing import Any

import pytest

from nanovllm import StructuredOutputs
from nanovllm.structured import grammars
from nanovllm.structured.compiled import (
    CHEAP,
    MOST_BYTES,
    MOST_KEPT,
    MOST_MATCHERS,
    SHARING,
    CompiledGrammars,
)
from nanovllm.structured.vocabulary import read_vocabulary
from tests.grammar_words import accepts, words_grammars


class Source:
    """Compiles nothing, in as many seconds as are asked for; knows what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._now = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self._now)

    def __call__(self, asked: StructuredOutputs) -> Any:
        name, seconds = str(asked.regex).split()
        if seconds == "wrong":
            raise ValueError(name)
        self.asked.append(name)
        self._now += float(seconds)
        return object()


def _ask(kept: CompiledGrammars, name: str, seconds: float | str = 0.001) -> Any:
    return kept.matcher(StructuredOutputs(regex=f"{name} {seconds}"))


def test_few_constraints_share_one_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    assert len({id(_ask(kept, "a")) for _ in range(SHARING)}) == 1
    assert source.asked == ["a"]


def test_many_constraints_share_several_matchers_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    rounds = [[_ask(kept, "a") for _ in range(SHARING * MOST_MATCHERS)] for _ in range(2)]
    assert rounds[0] == rounds[1]
    assert {rounds[0].count(matcher) for matcher in rounds[0]} == {SHARING}
    assert source.asked == ["a"] * MOST_MATCHERS


def test_what_takes_long_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    assert len({id(_ask(kept, "a", 0.1)) for _ in range(SHARING * 3)}) == 1
    assert source.asked == ["a"]


def test_the_tokenizer_is_read_before_the_first_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its second would count as the grammar's, which many constraints would then share."""

    now = 0.0

    def read(*args: Any) -> Any:
        nonlocal now
        now += 2 * CHEAP
        return read_vocabulary(*args)

    monkeypatch.setattr(grammars, "read_vocabulary", read)
    monkeypatch.setattr(time, "thread_time", lambda: now)
    found = words_grammars()
    constraint = found.constraint(StructuredOutputs(regex="a"))
    others = [found.constraint(StructuredOutputs(regex="a")) for _ in range(SHARING)]
    starts = {id(one._start) for one in (constraint, *others)}
    assert len(starts) == 2


def test_the_least_recently_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    for number in range(MOST_KEPT):
        _ask(kept, f"a{number}")
    _ask(kept, "a0")
    _ask(kept, "b")
    source.asked.clear()
    _ask(kept, "a0")
    assert source.asked == []
    _ask(kept, "a1")
    assert source.asked == ["a1"]


def test_large_ones_are_dropped_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long to compile is large: a second stands for up to 100 MiB."""
    kept = CompiledGrammars(source := Source(monkeypatch))
    _ask(kept, "small")
    for name in ("a", "b", "c"):
        _ask(kept, name, 1.4)
        _ask(kept, "small")
    _ask(kept, "b", 1.4)
    _ask(kept, "c", 1.4)
    assert source.asked == ["small", "a", "b", "c"]
    _ask(kept, "a", 1.4)
    assert source.asked[4:] == ["a"]


def test_all_matchers_of_a_grammar_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    for number in range(45):
        for _ in range(SHARING * MOST_MATCHERS):
            _ask(kept, f"a{number}", 0.009)
    assert len(source.asked) == 45 * MOST_MATCHERS
    _ask(kept, "a44", 0.009)
    assert len(source.asked) == 45 * MOST_MATCHERS
    _ask(kept, "a0", 0.009)
    assert source.asked[-1] == "a0", "45 times 72 ms are more than is kept"


def test_the_last_one_is_kept_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    for name in ("small", "a", "a", "a", "small"):
        _ask(kept, name, 0.001 if name == "small" else 100)
    assert source.asked == ["small", "a", "small"]


def test_an_error_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledGrammars(source := Source(monkeypatch))
    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            _ask(kept, "a", "wrong")
    _ask(kept, "b")
    assert source.asked == ["b"]


def test_constraints_of_all_matchers_are_alike() -> None:
    grammars = words_grammars()
    for _ in range(SHARING * 2 + 1):
        constraint = grammars.constraint(StructuredOutputs(choice=["ab", "cd"]))
        assert accepts(constraint, "cd")


def test_few_large_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are: a regular expression, or choices."""
    kept = CompiledGrammars(lambda _: object())  # type: ignore[arg-type,return-value]
    size = MOST_BYTES // 4
    asked = [
        StructuredOutputs(choice=[str(i), "a" * (size // 2 - 1), "b" * (size // 2)])
        if i % 2
        else StructuredOutputs(regex=str(i) + "a" * (size - 1))
        for i in range(6)
    ]
    for one in asked:
        assert one.size == size
        kept.matcher(one)
    assert [kept.has(one) for one in asked] == [False, False, True, True, True, True]
    grammars = words_grammars()
    for one in asked:
        grammars._keep(grammars._refused, one, "no", 16)
    assert [*grammars._refused] == asked[2:]
