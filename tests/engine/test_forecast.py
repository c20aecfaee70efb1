"""Forecast: who may join, by hand and against a pool that is filled step by step."""

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.engine import forecast
from nanovllm.engine.forecast import Forecast, Lengths
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make(num_tokens: int, more: int, known: bool = True, n: int = 1) -> Sequence:
    """A sequence that has `num_tokens` and gets `more`, or at most so many."""
    params = SamplingParams(max_tokens=more, ignore_eos=True, stop_token_ids=None if known else [9])
    seq = Sequence([1] * num_tokens, params)
    seq.siblings = [Sequence([1] * num_tokens, params) for _ in range(n - 1)]
    return seq


def running(
    num_tokens: int, more: int, block_size: int, known: bool = True, most: int = sys.maxsize
) -> Sequence:
    """One that decodes: all but its last token are computed."""
    seq = make(num_tokens, more, known)
    seq.num_cached_tokens = num_tokens - 1
    seq.block_table = [0] * -(-(num_tokens - 1) // block_size)
    seq.num_passed_blocks = max(0, len(seq.block_table) - most)
    return seq


def blocks(num_tokens: int, block_size: int, most: int) -> int:
    return min(-(-num_tokens // block_size), most)


def steps_until_full(
    seqs: list[Sequence], joining: Sequence, num_blocks: int, block_size: int, most: int
) -> float:
    """What really happens, one step after the other."""
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


@settings(deadline=None, max_examples=500, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 60)), min_size=1, max_size=12),
    st.tuples(st.integers(2, 60), st.integers(1, 60)),
    st.integers(0, 60),
    st.sampled_from([1, 2, 4, 16]),
    st.just(sys.maxsize) | st.integers(1, 20),
)
@example([(20, 30), (3, 50)], (40, 60), 3, 2, 9)
@example([(2, 1)], (3, 1), 0, 1, 2)  # at its window from the start
def test_a_forecast_of_known_lengths_errs(
    others: list[tuple[int, int]], new: tuple[int, int], spare: int, block_size: int, most: int
) -> None:
    """An end one step too early, a block too late, or a moment that is left out.

    With windows a sequence grows to `most` blocks, and may have done so before.
    """
    seqs = [running(*lengths, block_size, most=most) for lengths in others]
    joining = make(*new)
    taken = blocks(joining.num_tokens, block_size, most)
    num_free = taken + spare
    num_blocks = num_free + sum(len(seq.held_blocks) for seq in seqs)
    ahead = Forecast(Lengths(), seqs, num_free, block_size, most)
    real = steps_until_full(seqs, joining, num_blocks, block_size, most)
    assert ahead.admits(joining, taken) == (real >= forecast.WORTHWHILE[True] * joining.num_tokens)
    before = ahead.room, ahead.wanted, ahead.num_tokens[:], ahead.steps[:]
    if not ahead.admits(make(50, 60), 1000):  # a refusal changes nothing
        assert before == (ahead.room, ahead.wanted, ahead.num_tokens, ahead.steps)


def test_who_may_join_by_hand() -> None:
    """Blocks of 10, 10 of them: 60 tokens that grow to 80 leave room for one of 20 that ends."""
    seqs = [running(61, 20, 10)]
    assert len(seqs[0].block_table) == 6
    ahead = Forecast(Lengths(), seqs, 4, 10)
    assert ahead.admits(make(15, 5), 2)  # ends with the pool at 8 + 2
    assert not ahead.admits(make(15, 50), 2), "it wants a third block in 5 steps, of 2"
    ahead = Forecast(Lengths(), [running(61, 5, 10)], 4, 10)
    assert ahead.admits(make(19, 60), 2), "the other one ends before"


def test_a_long_way_is_worth_a_preemption() -> None:
    """Sequences that all grow to the end are begun together, though not all can end together."""
    ahead = Forecast(Lengths(), [running(2, 100, 10)], 9, 10)
    assert ahead.admits(make(10, 90), 1), "some 45 steps until the pool is full"
    ahead = Forecast(Lengths(), [running(80, 100, 10)], 2, 10)
    assert not ahead.admits(make(11, 90), 2), "none"


def test_the_first_may_always_join() -> None:
    assert Forecast(Lengths(), [], 3, 10).admits(make(25, 500), 3)


def test_followers_take_nothing() -> None:
    """Each sample grows by itself."""
    ahead = Forecast(Lengths(), [running(11, 10, 10)], 9, 10)
    assert ahead.admits(make(5, 5, n=4), 1)
    ahead = Forecast(Lengths(), [running(11, 10, 10)], 9, 10)
    assert not ahead.admits(make(10, 5, n=9), 1)


def test_lengths_are_learnt() -> None:
    """By hand: the mean of those that got further, and half as long again beyond all."""
    lengths = Lengths()
    new = make(10, 1000, known=False)
    assert lengths.steps_left(new) == 1, "timid before anything is known"
    assert lengths.steps_left(make(10, 1000)) == 1000
    for length in [10] * 8 + [30] * 8:
        ended = make(7, 1000, known=False)
        ended.token_ids += [1] * length
        lengths.learn(ended)
    assert lengths.steps_left(new) == 20
    new.token_ids += [1] * 10
    assert lengths.steps_left(new) == 20, "now one of the long ones"
    new.token_ids += [1] * 22
    assert lengths.steps_left(new) == 16
    assert lengths.steps_left(make(10, 12, known=False)) == 12, "longer than it may get"
    lengths.learn(make(7, 5))  # which tells nothing
    assert lengths.steps_left(make(10, 1000, known=False)) == 20


@pytest.mark.parametrize(("stop", "ids", "eos", "known"), [
    (None, None, True, True), (None, None, False, False), (["a"], None, True, False),
    (None, [3], True, False),
])  # fmt: skip
def test_what_is_known(
    stop: list[str] | None, ids: list[int] | None, eos: bool, known: bool
) -> None:
    params = SamplingParams(stop=stop, stop_token_ids=ids, ignore_eos=eos)
    assert Sequence([1], params, eos_token_ids=frozenset({2})).ends_by_length == known
