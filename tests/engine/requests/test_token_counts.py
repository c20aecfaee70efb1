"""TokenCounts: the tokens of a sequence, and of one that would have some more."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.schedule.sequence import Sequence

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=20)


def counted(counts: TokenCounts, more: list[int] | None = None) -> dict[int, int]:
    ids, numbers = counts.after(more or [])
    assert len(ids) == len(numbers) == len(set(ids.tolist()))
    assert (ids.dtype, numbers.dtype) == (np.int64, np.int32)
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def recount(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {token: output.count(token) for token in prompt + output}


@given(TOKENS, st.lists(TOKENS), st.lists(st.integers(0, 12), max_size=6))
def test_counts_follow_a_sequence_and_what_may_come_after_it(
    prompt: list[int], pieces: list[list[int]], more: list[int]
) -> None:
    """Tokens that only may come are not counted afterwards."""
    seq, counts = Sequence(prompt, SamplingParams()), TokenCounts()
    for piece in [[], *pieces]:
        seq.token_ids += piece
        counts.update(seq)
        output = seq.output_token_ids
        assert counted(counts) == recount(prompt, output)
        assert counted(counts, more) == recount(prompt, output + more)
        assert counted(counts) == recount(prompt, output)


def test_a_token_that_was_taken_back_does_not_count() -> None:
    seq, counts = Sequence([1], SamplingParams()), TokenCounts()
    seq.token_ids += [2, 3]
    counts.update(seq)
    seq.token_ids.pop()
    counts.update(seq)
    assert counted(counts) == {1: 0, 2: 1}


def test_more_tokens_than_there_was_room_for() -> None:
    seq, counts = Sequence([*range(300)], SamplingParams()), TokenCounts()
    seq.token_ids += [*range(200, 900)]
    counts.update(seq)
    assert counted(counts, [899, 5, 950]) == recount([*range(300)], [*range(200, 900), 899, 5, 950])
