"""Sequence: lengths, stop ids, bounds, and an audit that finds every invalid state."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from audits import audit_sequence

from nanovllm.engine.cache.prefixes import block_hashes
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.prompt_dicts import salt_number
from nanovllm.sampling_params import SamplingParams

EOS = frozenset({2, 3})


def test_the_prompt_is_copied() -> None:
    """The caller's list and the sequence's change independently."""
    prompt = [5, 6, 7]
    seq = Sequence(prompt, SamplingParams())
    seq.token_ids.append(8)
    prompt[0] = 9
    assert (prompt, seq.token_ids) == ([9, 6, 7], [5, 6, 7, 8])


def test_prefixes_have_a_root_for_each_adapter_and_salt() -> None:
    """And their hashes differ from the first block on: nobody waits for another root's block."""
    adapters = [None, *(SimpleNamespace(number=number) for number in (1, 2**63 - 1))]
    salts = [0, salt_number("a"), salt_number("b"), salt_number("a" * 256)]
    seqs = [
        Sequence([5, 6], SamplingParams(), parts=SequenceParts(adapter=adapter, salt=salt))
        for adapter in adapters
        for salt in salts
    ]
    assert len({seq.root for seq in seqs}) == len(seqs) == 12
    assert len({block_hashes(seq, 1, 2)[0] for seq in seqs}) == 12
    assert salt_number("a") == salts[1] and min(salts[1:]) > 2**64


def test_ids_are_unique_and_ascend() -> None:
    """No two requests have one id."""
    ids = [Sequence([1], SamplingParams()).seq_id for _ in range(3)]
    assert ids == [ids[0], ids[0] + 1, ids[0] + 2]


def test_lengths_count_prompt_cached_and_generated_tokens() -> None:
    """Prompt, cached and generated tokens are counted apart."""
    seq = Sequence([5, 6, 7], SamplingParams())
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_uncached_tokens) == (3, 3, 3)
    assert seq.output_token_ids == []
    seq.token_ids += [8, 9]
    seq.num_cached_tokens = 4
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_uncached_tokens) == (3, 5, 1)
    assert seq.output_token_ids == [8, 9]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "expected"),
    [(4, 100, 7), (4, 7, 7), (4, 6, 6), (1, 4, 4), (10**9, 100, 100)],
)
def test_length_is_limited_by_max_tokens_and_the_model(
    max_tokens: int, max_model_len: int, expected: int
) -> None:
    """A prompt of 3 may grow by max_tokens, and never beyond max_model_len."""
    params = SamplingParams(max_tokens=max_tokens)
    assert Sequence([5, 6, 7], params, max_model_len=max_model_len).max_num_tokens == expected


@pytest.mark.parametrize(
    ("params", "eos", "stop"),
    [
        (SamplingParams(), {2, 3}, {2, 3}),
        (SamplingParams(stop_token_ids=[7]), {2, 3}, {2, 3, 7}),
        (SamplingParams(ignore_eos=True), set(), set()),
        (SamplingParams(ignore_eos=True, stop_token_ids=[7]), set(), {7}),
        (SamplingParams(ignore_eos=True, stop_token_ids=[2]), set(), {2}),
    ],
    ids=["eos", "eos and stop", "ignore", "ignore, but stop", "ignore, but stop at that id"],
)
def test_stop_ids_are_eos_and_the_users_own(
    params: SamplingParams, eos: set[int], stop: set[int]
) -> None:
    """`ignore_eos` does not affect `stop_token_ids`; there may be several EOS ids."""
    seq = Sequence([1], params, eos_token_ids=EOS)
    assert (seq.eos_token_ids, seq.stop_token_ids) == (eos, stop)


@pytest.mark.parametrize(("own", "expected"), [(None, 11), (0, 0), (5, 5)])
def test_a_seed_is_the_requests_or_the_default(own: int | None, expected: int) -> None:
    """0 is a seed."""
    assert Sequence([1], SamplingParams(seed=own), default_seed=11).seed == expected


def test_finish_sets_reason_and_status() -> None:
    """The status, the reason and the id that stopped it."""
    seq = Sequence([1], SamplingParams())
    assert (seq.status, seq.finish_reason) == (SequenceStatus.WAITING, None)
    seq.finish("stop", 7)
    assert seq.status is SequenceStatus.FINISHED
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 7)


def running_sequence() -> Sequence:
    """Five tokens, two cached, three scheduled: as many as there may be."""
    seq = Sequence([5, 6, 7, 8, 9], SamplingParams(max_tokens=1))
    seq.status = SequenceStatus.RUNNING
    seq.block_tables, seq.num_passed_blocks, seq.room = [[0]], [0], 16
    seq.num_cached_tokens = 2
    seq.num_scheduled_tokens = 3
    return seq


def set_field(name: str, value: object) -> Callable[[Sequence], None]:
    return lambda seq: setattr(seq, name, value)


@pytest.mark.parametrize(
    "damage",
    [
        set_field("num_cached_tokens", -1),
        set_field("num_scheduled_tokens", -1),
        set_field("num_scheduled_tokens", 4),
        set_field("num_cached_tokens", 3),
        set_field("token_ids", [5, 6, 7, 8]),
        set_field("token_ids", [5, 6, 7, 8, 9, 10, 11]),
        set_field("room", 0),
        set_field("status", SequenceStatus.WAITING),
        set_field("status", SequenceStatus.FINISHED),
    ],
    ids=[
        "cached < 0", "scheduled < 0", "scheduled too many", "cached too many", "prompt shrank",
        "longer than allowed", "runs without blocks", "waits with blocks", "finished with blocks",
    ],
)  # fmt: skip
def test_audit_finds(damage: Callable[[Sequence], None]) -> None:
    """Each of these states is invalid."""
    seq = running_sequence()
    audit_sequence(seq)
    damage(seq)
    with pytest.raises(AssertionError):
        audit_sequence(seq)


def test_no_stray_attributes() -> None:
    """A misspelt field is an error."""
    with pytest.raises(AttributeError):
        Sequence([1], SamplingParams()).num_cached_token = 1  # type: ignore[attr-defined]
