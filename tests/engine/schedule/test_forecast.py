"""Forecast: which requests are admitted, by hand and against a pool filled step by step."""

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.engine.cache.block_manager import FreeBlocks
from nanovllm.engine.schedule import forecast
from nanovllm.engine.schedule.forecast import Forecast, Lengths
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make(num_tokens: int, more: int, known: bool = True, n: int = 1) -> Sequence:
    """A sequence of `num_tokens` that gets `more`, or at most `more` if its length is unknown."""
    params = SamplingParams(max_tokens=more, ignore_eos=True, stop_token_ids=None if known else [9])
    seq = Sequence([1] * num_tokens, params)
    seq.siblings = [Sequence([1] * num_tokens, params) for _ in range(n - 1)]
    return seq


NO_LIMIT = (sys.maxsize,)  # of one group's blocks


def running(
    num_tokens: int,
    more: int,
    block_size: int,
    known: bool = True,
    most: tuple[int, ...] = NO_LIMIT,
) -> Sequence:
    """A decoding sequence: all but its last token are computed."""
    seq = make(num_tokens, more, known)
    seq.num_cached_tokens = num_tokens - 1
    seq.block_tables = [[0] * -(-(num_tokens - 1) // block_size) for _ in most]
    seq.num_passed_blocks = [max(0, len(seq.block_table) - limit) for limit in most]
    return seq


def blocks(num_tokens: int, block_size: int, most: tuple[int, ...]) -> int:
    return sum(min(-(-num_tokens // block_size), limit) for limit in most)


def steps_until_full(
    seqs: list[Sequence], joining: Sequence, num_blocks: int, block_size: int, most: tuple[int, ...]
) -> float:
    """Simulate step by step: the number of steps until the pool is full."""
    state = [(seq.num_tokens, seq.max_num_tokens) for seq in seqs]
    state.append((joining.num_tokens + 1, joining.max_num_tokens))  # after its prefill
    step = 0
    while any(length < last for length, last in state):
        state = [(length, last) for length, last in state if length < last]
        if sum(blocks(length, block_size, most) for length, _ in state) > num_blocks:
            return step
        state = [(length + 1, last) for length, last in state]
        step += 1
    return float("inf")


@settings(deadline=None, max_examples=examples(500))
@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 60)), min_size=1, max_size=12),
    st.tuples(st.integers(2, 60), st.integers(1, 60)),
    st.integers(0, 60),
    st.sampled_from([1, 2, 4, 16]),
    st.lists(st.just(sys.maxsize) | st.integers(1, 20), min_size=1, max_size=4).map(tuple),
)
@example([(20, 30), (3, 50)], (40, 60), 3, 2, (9,))
@example([(2, 1)], (3, 1), 0, 1, (2,))  # at its window from the start
@example([(20, 30), (3, 50)], (40, 60), 3, 2, (sys.maxsize, 9, 9))
def test_a_forecast_of_known_lengths_is_exact(
    others: list[tuple[int, int]],
    new: tuple[int, int],
    spare: int,
    block_size: int,
    most: tuple[int, ...],
) -> None:
    """It admits a request if and only if the pool lasts long enough in the simulation.

    With windows a sequence grows to `most` blocks in a group, which it may have already.
    """
    seqs = [running(*lengths, block_size, most=most) for lengths in others]
    joining = make(*new)
    taken = blocks(joining.num_tokens, block_size, most)
    num_free = taken + spare
    num_blocks = num_free + sum(len(seq.held_blocks) for seq in seqs)
    ahead = Forecast(Lengths(), seqs, FreeBlocks(num_free, block_size, most))
    real = steps_until_full(seqs, joining, num_blocks, block_size, most)
    assert ahead.admits(joining, taken) == (real >= forecast.WORTHWHILE[True] * joining.num_tokens)
    before = ahead.room, ahead.wanted, ahead.num_tokens[:], ahead.steps[:]
    if not ahead.admits(make(50, 60), 1000):  # a refusal changes nothing
        assert before == (ahead.room, ahead.wanted, ahead.num_tokens, ahead.steps)


def test_admission_by_hand() -> None:
    """10 blocks of 10: 61 tokens that grow to 81 leave room for a request that ends at 20."""
    seqs = [running(61, 20, 10)]
    assert len(seqs[0].block_table) == 6
    ahead = Forecast(Lengths(), seqs, FreeBlocks(4, 10, NO_LIMIT))
    assert ahead.admits(make(15, 5), 2)  # ends with the pool at 8 + 2
    assert not ahead.admits(make(15, 50), 2), "it wants a third block in 5 steps, of 2"
    ahead = Forecast(Lengths(), [running(61, 5, 10)], FreeBlocks(4, 10, NO_LIMIT))
    assert ahead.admits(make(19, 60), 2), "the other one ends before"


def test_a_late_preemption_is_accepted() -> None:
    """A sequence is admitted although the pool will be too small, if that is many steps ahead."""
    ahead = Forecast(Lengths(), [running(2, 100, 10)], FreeBlocks(9, 10, NO_LIMIT))
    assert ahead.admits(make(10, 90), 1), "some 45 steps until the pool is full"
    ahead = Forecast(Lengths(), [running(80, 100, 10)], FreeBlocks(2, 10, NO_LIMIT))
    assert not ahead.admits(make(11, 90), 2), "none"


def test_the_first_sequence_is_always_admitted() -> None:
    assert Forecast(Lengths(), [], FreeBlocks(3, 10, NO_LIMIT)).admits(make(25, 500), 3)


def test_each_sample_needs_its_own_blocks() -> None:
    """4 samples of a request fit, 9 do not."""
    ahead = Forecast(Lengths(), [running(11, 10, 10)], FreeBlocks(9, 10, NO_LIMIT))
    assert ahead.admits(make(5, 5, n=4), 1)
    ahead = Forecast(Lengths(), [running(11, 10, 10)], FreeBlocks(9, 10, NO_LIMIT))
    assert not ahead.admits(make(10, 5, n=9), 1)


def test_lengths_are_learnt_from_ended_sequences() -> None:
    """The mean of the longer ones that ended; if there are none, half the length so far."""
    lengths = Lengths()
    new = make(10, 1000, known=False)
    assert lengths.steps_left(new) == 1, "the least, before any length is known"
    assert lengths.steps_left(make(10, 1000)) == 1000
    for length in [10] * 8 + [30] * 8:
        ended = make(7, 1000, known=False)
        ended.token_ids += [1] * length
        assert lengths.steps_left(new) == 1, "too few have ended"
        lengths.learn(ended)
    assert lengths.steps_left(new) == 20
    new.token_ids += [1] * 10
    assert lengths.steps_left(new) == 20, "now one of the long ones"
    new.token_ids += [1] * 22
    assert lengths.steps_left(new) == 16
    assert lengths.steps_left(make(10, 12, known=False)) == 12, "longer than it may get"
    known = make(7, 50)
    known.token_ids += [1] * 50
    lengths.learn(known)  # that it gets so long was no news
    assert lengths.steps_left(make(10, 1000, known=False)) == 20


@pytest.mark.parametrize(("stop", "ids", "eos", "known"), [
    (None, None, True, True), (None, None, False, False), (["a"], None, True, False),
    (None, [3], True, False),
])  # fmt: skip
def test_when_the_length_is_known(
    stop: list[str] | None, ids: list[int] | None, eos: bool, known: bool
) -> None:
    params = SamplingParams(stop=stop, stop_token_ids=ids, ignore_eos=eos)
    assert Sequence([1], params, eos_token_ids=frozenset({2})).ends_by_length == known
