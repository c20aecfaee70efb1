"""N-grams: the latest occurrence of the longest one, found fast."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.drafting.ngram_proposer import NgramProposer, NgramText
from nanovllm.engine.schedule.sequence import PENDING, Sequence


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
    assert NgramText(1, 3).propose(make_seq(token_ids), 3) == drafts


def test_tokens_that_were_taken_back_are_not_found() -> None:
    seq, text = make_seq([1, 2, 3, 4]), NgramText(1, 3)
    assert text.propose(seq, 1) == []
    del seq.token_ids[1:]
    assert text.propose(seq, 1) == []
    seq.token_ids += [3, 5, 3]
    assert text.propose(seq, 1) == [5]


def test_an_ngram_begins_with_a_token() -> None:
    """Not in the middle of one, where the bytes of two others may be equal to it."""
    one, two = 0x01000000, 0x00000001  # their bytes: 0 0 0 1, 1 0 0 0
    across = 0x00000101  # 1 1 0 0, as the last byte of the first and three of the second
    assert NgramText(1, 1).propose(make_seq([one, two, across]), 1) == []
    assert NgramText(1, 1).propose(make_seq([across, 9, one, two, across]), 1) == [9]


def test_shorter_matches_than_the_shortest_do_not_count() -> None:
    assert NgramText(2, 3).propose(make_seq([1, 2, 3, 2]), 3) == []


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


def test_tokens_in_flight_are_no_part_of_the_text() -> None:
    seq, index = make_seq([1, 2, 1, 2]), NgramText(1, 2)
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
    assert len(proposer._texts) == 1
    del seq
    assert len(proposer._texts) == 0


def test_a_step_takes_microseconds_in_a_long_text() -> None:
    """The median of many steps, of which most find a short n-gram only."""
    rng = random.Random(0)
    proposer = NgramProposer(1, 4)
    seq = make_seq(rng.choices(range(1000), k=20_000))
    proposer.propose([seq], [4])
    times = []
    for _ in range(300):
        seq.token_ids.append(rng.randrange(1000))
        start = time.thread_time()
        proposer.propose([seq], [4])
        times.append(time.thread_time() - start)
    assert sorted(times)[150] < 1e-3
