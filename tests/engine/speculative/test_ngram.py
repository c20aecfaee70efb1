"""N-grams: the latest occurrence of the longest one, found in a time that does not grow."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.engine.speculative.ngram import NgramIndex, NgramProposer


def make_seq(token_ids: list[int]) -> Sequence:
    return Sequence(token_ids, SamplingParams())


def search(token_ids: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The same by looking at every place, the last one first."""
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                text = list(token_ids)
                for index in range(most):
                    text.append(text[start + n + index])
                return text[len(token_ids) :]
    return []


@pytest.mark.parametrize(
    ("token_ids", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest
        ([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], [7, 1, 2]),  # but a longer one is better
        ([4, 4], [4, 4, 4]),  # drafts go on where the tokens end
        ([6, 7, 6, 7], [6, 7, 6]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts_are_what_came_after_the_longest_match(
    token_ids: list[int], drafts: list[int]
) -> None:
    assert NgramIndex(1, 3).propose(make_seq(token_ids), 3) == drafts


def test_shorter_matches_than_the_shortest_do_not_count() -> None:
    assert NgramIndex(2, 3).propose(make_seq([1, 2, 3, 2]), 3) == []


@given(st.data(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_drafts_equal_a_plain_search_while_a_sequence_grows(
    data: st.DataObject, shortest: int, more: int, most: int
) -> None:
    """Also when a token is taken back, and when some updates are left out."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    seq, proposer = make_seq(data.draw(tokens)), NgramProposer(shortest, shortest + more)
    for _ in range(data.draw(st.integers(1, 8))):
        (drafts,) = proposer.propose([seq], [most])
        assert drafts == search(seq.token_ids, shortest, shortest + more, most)
        if data.draw(st.integers(0, 5)) == 0 and seq.num_tokens > 1:
            seq.token_ids.pop()
        seq.token_ids += data.draw(tokens)
        if data.draw(st.integers(0, 5)) == 0:
            proposer.reset()


def test_tokens_in_flight_are_not_indexed() -> None:
    seq, index = make_seq([1, 2, 1, 2]), NgramIndex(1, 2)
    seq.token_ids.append(PENDING)
    seq.num_pending_tokens = 1
    index.update(seq)
    seq.token_ids[-1] = 3
    seq.num_pending_tokens = 0
    assert index.propose(seq, 1) == []
    seq.token_ids += [1, 2]
    assert index.propose(seq, 1) == [3]


def test_the_proposer_keeps_nothing_of_a_sequence_that_is_gone() -> None:
    proposer = NgramProposer(1, 4)
    seq = make_seq([1, 1])
    proposer.propose([seq], [1])
    assert len(proposer._indices) == 1
    del seq
    assert len(proposer._indices) == 0


def test_a_step_takes_a_few_microseconds_at_any_length() -> None:
    """The median of many steps: at most 10 microseconds on a machine that is not slow."""
    rng = random.Random(0)
    proposer = NgramProposer(1, 4)
    seq = make_seq(rng.choices(range(1000), k=20_000))
    proposer.propose([seq], [4])
    times = []
    for _ in range(300):
        seq.token_ids.append(rng.randrange(1000))
        start = time.perf_counter()
        proposer.propose([seq], [4])
        times.append(time.perf_counter() - start)
    assert sorted(times)[150] < 40e-6
