"""What narrows the samples of a step, on the host: as it is written down, and quickly."""

import gc
import time
from typing import Any, TypeVar

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import SamplingParams
from nanovllm.engine.requests.bad_words import BadWords
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.run.draw_inputs import draw_inputs
from nanovllm.engine.run.filters import entries
from nanovllm.engine.run.filters.biases import Biases
from nanovllm.engine.run.filters.listed import AllowedIds, ForbiddenIds, forbidden_tokens
from nanovllm.engine.run.filters.penalties import Penalties
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.layers.filters import Filters

C = TypeVar("C")
VOCAB_SIZE = 151_936
IDS = st.integers(0, 9)


def pairs(ids_of_rows: list[tuple[int, Any]]) -> tuple[list[int], list[int]]:
    """Rows and ids one by one: the slow, obvious twin."""
    found = [(row, token_id) for row, ids in ids_of_rows for token_id in ids]
    return [row for row, _ in found], [token_id for _, token_id in found]


def change_of(filters: Filters, kind: type[C]) -> C | None:
    """The change of this class, if there is one."""
    found = [change for change in filters.changes if isinstance(change, kind)]
    return found[0] if found else None


def as_lists(entries: tuple[torch.Tensor, torch.Tensor]) -> tuple[list[int], list[int]]:
    return entries[0].tolist(), entries[1].tolist()


@settings(max_examples=examples(200), deadline=None)
@given(
    given_params=st.lists(
        st.fixed_dictionaries(
            {},
            optional=dict(
                allowed_token_ids=st.lists(IDS, min_size=1, max_size=4),
                logit_bias=st.dictionaries(IDS, st.floats(-9, 9, width=32), min_size=1, max_size=4),
                stop_token_ids=st.lists(IDS, max_size=4),
                min_tokens=st.integers(0, 1),
            ),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_entries_are_those_of_the_rows_one_by_one(given_params: list[dict[str, Any]]) -> None:
    seqs = [Sequence([1, 2], SamplingParams(**params), default_seed=0) for params in given_params]
    narrowed = [seq for seq in seqs if seq.is_narrowed]
    for _ in range(2):  # the second step has what the first one has kept
        filters = draw_inputs(seqs, VOCAB_SIZE, "cpu").filters
        if not narrowed:
            assert filters == []
            continue
        (only,) = filters
        assert only.rows.tolist() == [row for row, seq in enumerate(seqs) if seq.is_narrowed]
        params = [seq.params for seq in narrowed]
        allowed = [
            (row, p.allowed_token_ids) for row, p in enumerate(params) if p.allowed_token_ids
        ]
        change = change_of(only, AllowedIds)
        assert (change is None) == (not allowed)
        if change is not None:
            assert change.rows.tolist() == [row for row, _ in allowed]
            assert as_lists(change.entries) == pairs(allowed)
        biased = [(row, p.logit_bias) for row, p in enumerate(params) if p.logit_bias]
        biases = change_of(only, Biases)
        assert (biases is None) == (not biased)
        if biases is not None:
            assert as_lists(biases.entries) == pairs(biased)
            assert biases.values.tolist() == [v for _, b in biased for v in b.values()]
        stops = [
            (row, ids)
            for row, p in enumerate(params)
            if p.min_tokens and (ids := set(p.stop_token_ids or ()))
            if not (p.allowed_token_ids and ids.issuperset(p.allowed_token_ids))
        ]
        forbidden = change_of(only, ForbiddenIds)
        assert (forbidden is None) == (not stops)
        if forbidden is not None:
            found = {*zip(*as_lists(forbidden.entries), strict=True)}
            assert found == {*zip(*pairs(stops), strict=True)}


def test_rows_of_penalties_are_filled_up_with_their_first_token() -> None:
    """Any other token would be penalized, too."""
    params = SamplingParams(repetition_penalty=2.0)
    seqs = [
        Sequence(prompt, params, default_seed=0, parts=SequenceParts(counts=TokenCounts()))
        for prompt in ([7, 8, 9], [5])
    ]
    (filters,) = draw_inputs(seqs, 10, "cpu").filters
    penalties = change_of(filters, Penalties)
    assert penalties is not None and penalties.ids.tolist() == [[7, 8, 9], [5, 5, 5]]


def test_long_lists_of_ids_delay_no_step() -> None:
    """They become arrays once: pairs of a row and an id took 50 ms in each step."""
    ids = range(100_000)
    for given_params in (dict(allowed_token_ids=ids), dict(logit_bias=dict.fromkeys(ids, 1.0))):
        seqs = [Sequence([1], SamplingParams(**given_params), default_seed=0)]  # type: ignore[arg-type]
        seconds = []
        for _ in range(5):
            start = time.thread_time()
            assert draw_inputs(seqs, VOCAB_SIZE, "cpu").filters
            seconds.append(time.thread_time() - start)
        assert min(seconds) < 0.01


def test_arrays_of_ids_end_with_their_params() -> None:
    gc.collect()  # what other tests have left
    before = len(entries._kept)
    params = SamplingParams(allowed_token_ids=[1, 2])
    seqs = [Sequence([1], params, default_seed=0) for _ in range(3)]
    (filters,) = draw_inputs(seqs, VOCAB_SIZE, "cpu").filters
    assert change_of(filters, AllowedIds) is not None and len(entries._kept) == before + 1
    del params, seqs
    gc.collect()
    assert len(entries._kept) == before


def forbidden_by(seq: Sequence, assumed: list[int]) -> set[int]:
    """The tokens that the sequence forbids, which are equal as sets and as arrays."""
    found = forbidden_tokens(seq, assumed)
    arrays = {i for some in found for i in some.array.tolist()}
    assert arrays == {i for some in found for i in some.ids}
    return arrays


def test_bad_words_begin_in_the_output() -> None:
    """The prompt's last token is no part of one; a draft is."""
    seq = Sequence(
        [4, 5], SamplingParams(), parts=SequenceParts(bad_words=BadWords([(5, 6), (7,)]))
    )
    assert forbidden_by(seq, []) == {7}
    assert forbidden_by(seq, [5]) == {6, 7}
    seq.token_ids.append(5)
    assert forbidden_by(seq, []) == {6, 7}
    assert forbidden_by(seq, [8]) == {7}


def test_stops_are_forbidden_up_to_min_tokens() -> None:
    """Drafts count as tokens: the stop may come behind the last one of `min_tokens`."""
    ends = frozenset({2, 3})
    seq = Sequence([1], SamplingParams(min_tokens=2), eos_token_ids=ends)
    assert [forbidden_by(seq, [5] * n) for n in range(3)] == [ends, ends, set()]
