"""Bad words: what is forbidden next, and how little of a long list a step reads."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.engine.requests.bad_words import BadWords

IDS = st.integers(0, 2)


@settings(max_examples=examples(300), deadline=None)
@given(
    words=st.lists(st.lists(IDS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=20),
    output=st.lists(IDS, max_size=8),
)
def test_what_is_forbidden_is_that_of_the_slow_twin(
    words: list[tuple[int, ...]], output: list[int]
) -> None:
    bad_words = BadWords(words)
    expected = {
        last
        for *before, last in words
        if len(before) <= len(output) and output[len(output) - len(before) :] == before
    }
    for given_output in (output, output[max(0, len(output) - bad_words.longest) :]):
        found = bad_words.after(given_output)
        assert {i for some in found for i in some.ids} == expected
        assert {i for some in found for i in some.array.tolist()} == expected
    assert bad_words.longest == max(map(len, words)) - 1
    assert bad_words.alone == {word[0] for word in words if len(word) == 1}


class Counted(list[Any]):
    """A list that counts how often its values are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(index)


def test_a_step_does_not_read_all_words() -> None:
    """Words of one token are one set; of the others a step reads a few, by its last tokens."""
    alone = [(i,) for i in range(20_000)]
    pairs = [(i, j) for i in range(200) for j in range(100)]
    long = [(i, i, i, j) for i in range(20_000) for j in (7, 8)]
    bad_words = BadWords([*alone, *pairs, *long])
    for name in ("_starts", "_lasts", "_shorter"):
        setattr(bad_words, name, Counted(getattr(bad_words, name)))
    for output, sizes in (([9, 9, 9], [2, 100, 20_000]), ([1, 300], [20_000]), ([], [20_000])):
        Counted.reads = 0
        assert [len(some.array) for some in bad_words.after(output)] == sizes
        assert Counted.reads < 40


def test_a_long_word_is_found_by_comparing_it_once() -> None:
    """Also if many others begin like it."""
    words = [*((1,) * 500 + (i,) for i in range(1000)), (2, *(1,) * 500, 3)]
    bad_words = BadWords(words)
    assert [len(some.ids) for some in bad_words.after([2, *(1,) * 500])] == [1, 1000]
    assert bad_words.after([1] * 499) == []
