"""Stop strings end a text at the same character, however it is cut into tokens."""

import gc
import random
import time
import tracemalloc
from typing import Any

import pytest
from conftest import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import SamplingParams
from nanovllm.engine.requests import stop_search
from nanovllm.engine.requests.output_text import OutputText
from nanovllm.engine.requests.request import Request
from nanovllm.engine.requests.stop_search import StopSearch
from nanovllm.engine.requests.stop_text import TextUntilStop
from nanovllm.engine.requests.stream import Stream
from nanovllm.engine.schedule.parts import End, SequenceParts
from nanovllm.engine.schedule.sequence import Sequence

TOKENIZER = byte_tokenizer()


class Words:
    """A tokenizer whose ids are indices of any pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.pieces[token_id]


def text_of(tokenizer: Any, params: SamplingParams) -> OutputText:
    """The follower that a request with these parameters has."""
    return (TextUntilStop if params.stop else OutputText)(tokenizer, params)


def follow(tokenizer: Any, ids: list[int], **params: Any) -> tuple[OutputText, Sequence, int]:
    """The text of `ids` until something stops it, and how many ids that took."""
    text = text_of(tokenizer, SamplingParams(**params))
    seq = Sequence([0, 1], SamplingParams(**params))
    emitted = ""
    for count, token_id in enumerate(ids, 1):
        seq.token_ids.append(token_id)
        stop = text.update(seq)
        certain = text.text[: text.num_certain]
        assert certain.startswith(emitted), "emitted text is taken back"
        emitted = certain
        if stop is not None:
            return text, seq, count
    assert text.finish(seq).startswith(emitted)
    return text, seq, len(ids)


def by_character(full: str, stops: list[str]) -> tuple[str, str] | None:
    """The text before the stop, and the stop: the slow, obvious twin."""
    for end in range(1, len(full) + 1):
        ending = [stop for stop in stops if full[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return full[: end - len(longest)], longest
    return None


@settings(max_examples=examples(300), deadline=None)
@given(
    pieces=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_a_stop_does_not_depend_on_where_tokens_end(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    """Stops that span tokens, overlap, are prefixes of each other, or end the text."""
    options: dict[str, Any] = dict(stop=stops, include_stop_str_in_output=include)
    text, seq, count = follow(Words(pieces), list(range(len(pieces))), **options)
    expected = by_character("".join(pieces), stops)
    if expected is None:
        assert text.stop is None and text.finish(seq) == "".join(pieces)
        return
    left, stop = expected
    assert (text.stop, text.text) == (stop, left + stop if include else left)
    assert text.finish(seq) == text.text
    before = "".join(pieces[: count - 1])
    assert by_character(before, stops) is None, "found later than with the token that completes it"


def test_stops_of_several_tokens_are_found() -> None:
    ids = TOKENIZER.encode("ein Käse 🙂, bitte", add_special_tokens=False)
    for stop, left in [("ä", "ein K"), ("🙂", "ein Käse "), (" 🙂,", "ein Käse"), ("e, b", None)]:
        text, seq, count = follow(TOKENIZER, ids, stop=[stop])
        whole = TOKENIZER.decode(ids)
        assert (text.stop, text.finish(seq)) == ((None, whole) if left is None else (stop, left))
        assert (count < len(ids)) == (left is not None)


def test_stops_before_min_tokens_do_not_count() -> None:
    pieces = ["a", "b", "c", "a", "b"]
    text, _, count = follow(Words(pieces), [0, 1, 2, 3, 4], stop="b", min_tokens=2)
    assert (text.text, count) == ("abca", 5)
    text, _, count = follow(Words(pieces), [0, 1, 2, 3, 4], stop="b", min_tokens=1)
    assert (text.text, count) == ("a", 2)


@pytest.mark.parametrize(("min_tokens", "left"), [(2, "a\ufffd"), (1, "a")])
def test_text_held_back_to_the_end_stops_nothing_before_min_tokens(
    min_tokens: int, left: str
) -> None:
    """The last token is the first byte of a character; no other byte comes."""
    ids = TOKENIZER.encode("aé", add_special_tokens=False)[:2]
    text, seq, _ = follow(TOKENIZER, ids, stop="\ufffd", min_tokens=min_tokens)
    assert text.finish(seq) == left


@pytest.mark.parametrize(("include", "whole"), [(False, "a"), (True, "ab")])
def test_a_token_that_stopped_is_left_out_of_the_text(include: bool, whole: str) -> None:
    params = SamplingParams(stop="c", stop_token_ids=[1], include_stop_str_in_output=include)
    text, seq = TextUntilStop(Words(["a", "b"]), params), Sequence([0], params)
    seq.token_ids += [0, 1]
    seq.finish("stop", 1)
    assert text.finish(seq) == whole


def test_a_token_taken_back_leaves_the_text() -> None:
    """After an interrupt the last token, which may have completed a stop, is sampled again."""
    params = SamplingParams(stop="b")
    text, seq = TextUntilStop(Words(["a", "b", "c"]), params), Sequence([0], params)
    seq.token_ids += [0, 1]
    assert text.update(seq) == End("stop", "b")
    seq.token_ids.pop()
    assert text.update(seq) is None
    seq.token_ids.append(2)
    assert text.update(seq) is None and text.finish(seq) == "ac"


@pytest.mark.parametrize(
    ("generated", "certain"), [("xy", 2), ("xa", 1), ("xab", 1), ("aab", 1), ("xabd", 4), ("", 0)]
)
def test_text_that_may_begin_a_stop_is_not_certain(generated: str, certain: int) -> None:
    params = SamplingParams(stop=["abc", "zz"])
    text, seq = TextUntilStop(Words(list("abcdxy")), params), Sequence([0], params)
    seq.token_ids += ["abcdxy".index(c) for c in generated]
    assert text.update(seq) is None and text.num_certain == certain


def certain_by_length(text: str, stops: list[str]) -> int:
    """How many characters are final: the slow, obvious twin."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return len(text) - length
    return len(text)


@settings(max_examples=examples(300), deadline=None)
@given(
    pieces=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=6), max_size=5),
    min_tokens=st.integers(0, 30),
    asked=st.sets(st.integers(1, 30)),
)
def test_certain_text_is_that_of_the_slow_twin(
    pieces: list[str], stops: list[str], min_tokens: int, asked: set[int]
) -> None:
    """Whenever it is asked for, with stops that are in the text before `min_tokens` too."""
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None)
    text, seq = text_of(Words(pieces), params), Sequence([0], params)
    for count in range(1, len(pieces) + 1):
        seq.token_ids.append(count - 1)
        if text.update(seq) is not None:
            assert text.num_certain == len(text.text)
            break
        if count in asked:
            assert text.num_certain == certain_by_length(text.text, stops)
    text.reset()
    seq.token_ids = [0, 0]
    if text.update(seq) is None:
        assert text.num_certain == certain_by_length(pieces[0], stops)


@pytest.mark.parametrize("repeated", [False, True])
def test_many_long_stops_delay_no_event(repeated: bool) -> None:
    rng = random.Random(0)
    stops = ["".join(rng.choices("word ", k=2000)) for _ in range(1000)]
    if repeated:
        stops = ["w" * 1990 + f"{number:010}" for number in range(1000)]
    params = SamplingParams(stop=stops)
    text, seq = TextUntilStop(Words(["word " * 800, "w"]), params), Sequence([0], params)
    seconds = []
    for token_id in (0, *[1] * 5):
        seq.token_ids.append(token_id)
        assert text.update(seq) is None
        start = time.thread_time()
        certain = text.num_certain
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.01 and certain == certain_by_length(text.text, stops)


@pytest.mark.parametrize("stop", [(), ("bc", "ab")])
def test_a_long_text_is_not_copied_for_each_token(stop: tuple[str, ...]) -> None:
    """An event allocates little, however much text came before it."""
    params = SamplingParams(stop=stop, max_tokens=None)
    parts = SequenceParts(text=text_of(Words(["a" * 1000, "b"]), params))
    seq = Sequence([0], params, parts=parts)
    stream, request = Stream([0], [1], None), Request([seq])
    seq.token_ids += [0] * 400
    (event,) = stream.events(0, request)
    texts = [event.text]
    tracemalloc.start()
    try:
        for token_id in [0, 1, 1] if not stop else [0, 0, 0]:
            seq.token_ids.append(token_id)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            (event,) = stream.events(0, request)
            assert tracemalloc.get_traced_memory()[1] - before < 40_000
            texts.append(event.text)
    finally:
        tracemalloc.stop()
    seq.finish("length")
    (event,) = stream.events(0, request)
    assert "".join([*texts, event.text]) == parts.text.text
    assert len(parts.text.text) == (403_000 if stop else 401_002)


@settings(max_examples=examples(100), deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=9), data=st.data())
def test_a_part_of_the_text_is_that_of_the_whole(pieces: list[str], data: st.DataObject) -> None:
    text, seq = OutputText(Words(pieces), SamplingParams()), Sequence([0], SamplingParams())
    for token_id in range(len(pieces)):
        seq.token_ids.append(token_id)
        text.update(seq)
    whole = "".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert text.part(start, end) == whole[start:end] and text.num_chars == len(whole)
    assert text.text == whole and text.part(start, end) == whole[start:end]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each search among the stops: how many states they have then."""
    made: list[int] = []
    plain = StopSearch._child

    def counted(*args: Any) -> Any:
        made.append(1)
        return plain(*args)

    monkeypatch.setattr(StopSearch, "_child", counted)
    return made


@pytest.mark.parametrize("num_stops", [100, 10_000])
def test_the_work_for_a_character_does_not_depend_on_the_number_of_stops(
    num_stops: int, searches: list[int]
) -> None:
    rng = random.Random(0)
    stops = {"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(num_stops)}
    pieces = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(3_000)]
    follow(Words(pieces), [*range(len(pieces))], stop=[*stops])
    assert len(searches) < 5 * 3 * len(pieces)


def test_a_text_that_begins_no_stop_is_not_searched(searches: list[int]) -> None:
    follow(Words(["word ", "<"]), [0] * 1000, stop=["<|im_end|>", "\n\n"])
    assert not searches


def test_repeated_beginnings_of_a_stop_take_linear_work(searches: list[int]) -> None:
    """The worst case of a search that starts over at every character."""
    follow(Words(["a" * 999 + "c"]), [0] * 20, stop=["a" * 1000 + "b", "ac" * 1000])
    assert len(searches) < 3 * 20_000


def test_samples_share_one_search_as_long_as_one_of_them_lives() -> None:
    gc.collect()
    before, params = len(stop_search._searches), SamplingParams(stop=["one", "two"])
    texts = [TextUntilStop(Words(["x"]), params) for _ in range(3)]
    assert len(stop_search._searches) == before + 1
    del texts
    gc.collect()
    assert len(stop_search._searches) == before
