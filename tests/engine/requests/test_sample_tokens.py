"""Samples share a long prompt, and what they read and write is that of a list."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import SamplingParams
from nanovllm.engine.requests.sample_tokens import LONG, SampleTokens, shared
from nanovllm.engine.schedule.sequence import Sequence

INDEX = st.integers(-12, 12)
PLACE = st.none() | INDEX


@settings(max_examples=examples(200), deadline=None)
@given(size=st.integers(0, 6), data=st.data())
def test_the_tokens_are_those_of_a_list(size: int, data: st.DataObject) -> None:
    """Any read; and any change of the output, as the scheduler and drafts make them."""
    twin = [*range(size)]
    tokens = SampleTokens([*twin], [])
    for token_id in range(100, 100 + data.draw(st.integers(0, 8))):
        change = data.draw(st.sampled_from(["append", "extend", "set", "replace", "pop", "none"]))
        at = data.draw(st.integers(size, max(size, len(twin) - 1)))
        popped = []
        for some in (twin, tokens):
            if change == "append":
                some.append(token_id)
            elif change == "extend":
                some += [token_id, -1]
            elif change == "replace":
                some[at : at + 1] = [-1, -1]
            elif len(some) > at and change == "set":
                some[at] = token_id
            elif len(some) > at and change == "pop":
                popped.append(some.pop(at))
        assert popped[:1] == popped[1:]
        assert len(tokens) == len(twin) and [*tokens] == twin
        one = slice(data.draw(PLACE), data.draw(PLACE), data.draw(st.sampled_from([None, 1, -1])))
        assert tokens[one] == twin[one]
        index = data.draw(INDEX)
        if -len(twin) <= index < len(twin):
            assert tokens[index] == twin[index]
    another = tokens.copy()
    another.append(5)
    assert [*tokens] == twin and [*another] == [*twin, 5]


def test_the_prompt_cannot_change() -> None:
    tokens = SampleTokens([1, 2, 3], [4])
    changes: list[Any] = [
        lambda: tokens.__setitem__(2, 0), lambda: tokens.__setitem__(slice(2, 4), [0]),
        lambda: tokens.__delitem__(-2), lambda: tokens.insert(0, 0),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(AssertionError, match="cannot change"):
            change()
    for index in (4, -5):
        with pytest.raises(IndexError):
            tokens[index]
    assert [*tokens] == [1, 2, 3, 4]


def test_samples_copy_no_long_prompt_and_no_set_of_stops() -> None:
    """1,000 samples of 100,000 tokens took 0.8 GB, and again in the caller's process."""
    params = SamplingParams(n=300, stop_token_ids=range(50_000))
    prompt = shared([7] * 100_000, 2)
    first = Sequence(prompt, params)
    tracemalloc.start()
    try:
        samples = [Sequence(prompt, params, index=index, first=first) for index in range(1, 300)]
        for sample in samples:
            sample.token_ids.append(1)
        allocated = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert allocated < 2_000_000, "a copy of the prompt takes 0.8 MB"
    assert all(sample.stop_token_ids is first.stop_token_ids for sample in samples)
    assert first.num_tokens == 100_000 and samples[0].num_tokens == 100_001


def test_short_prompts_stay_lists() -> None:
    """Lists are faster."""
    assert type(shared([1] * (LONG - 1), 9)) is list and type(shared([1] * LONG, 2)) is SampleTokens
    assert type(shared([1] * 1000, 999)) is list and type(shared([1] * 1000, 1000)) is SampleTokens
