"""Checkpoints: where conversations and shared prompts go on, and which one is dropped first."""

from collections import deque

import pytest
from audits import audit_caches
from state_caches import (
    ALONE,
    WITH_KV,
    admit,
    decode,
    end,
    make_caches,
    make_seq,
    num_restored,
    run,
    run_and_free,
    step,
)

from nanovllm.engine.cache.branches import LOOK_AHEAD, num_equal_blocks
from nanovllm.engine.cache.checkpoints import Checkpoints
from nanovllm.engine.cache.prefixes import Prefix
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import SequenceStatus

BOTH = pytest.mark.parametrize("windows", [WITH_KV, ALONE, (None, 3)])


@BOTH
def test_the_next_turn_begins_at_the_last_full_block(windows: tuple[int | None, ...]) -> None:
    """Not at the interval of 8 before it. Checkpoints of earlier blocks make room."""
    caches = make_caches(windows)
    seq = run(caches, range(3))
    decode(caches, seq, range(3, 31))
    assert len(caches.states.checkpoints) == 4, "three at intervals, and the last one"
    caches.free(seq)
    assert num_restored(caches, [*range(31), 99]) == 28


def test_a_rolling_checkpoint_needs_no_second_slot_if_none_is_free() -> None:
    """Five slots: three of sequences, two of checkpoints. The older one stays."""
    caches = make_caches(num_checkpoints=2)
    run_and_free(caches, range(30, 35))
    seq = run(caches, [1, 2, 3])
    others = [admit(caches, [each]) for each in (7, 8)]
    decode(caches, seq, [4, 5], *others)
    assert not caches.states.free_slots
    decode(caches, seq, [6, 7, 8], *others)
    for each in (seq, *others):
        caches.free(each)
    assert num_restored(caches, [*range(1, 9), 99]) == 8
    assert num_restored(caches, range(30, 36)) == 4


@BOTH
def test_a_rolling_checkpoint_that_another_begins_with_stays(
    windows: tuple[int | None, ...],
) -> None:
    caches = make_caches(windows)
    seq = run(caches, [1, 2, 3])
    decode(caches, seq, [4, 5])
    other = admit(caches, [1, 2, 3, 4, 9])
    assert other.num_cached_tokens == 4
    end(caches, step(caches, other), seq)
    decode(caches, seq, [6, 7, 8], other)
    for each in (seq, other):
        caches.free(each)
    assert num_restored(caches, [1, 2, 3, 4, 8]) == 4


@BOTH
def test_a_preempted_sequence_restarts_at_its_last_full_block(
    windows: tuple[int | None, ...],
) -> None:
    """Also if the step that computed it is in flight: its tokens are known."""
    caches = make_caches(windows)
    seq = run(caches, [1, 2, 3])
    decode(caches, seq, [4, 5, 6, 7])
    seq.token_ids.append(8)
    step(caches, seq)
    seq.num_cached_tokens, seq.num_scheduled_tokens = 8, 0  # launched, and not published
    seq.token_ids.append(-1)
    seq.num_pending_tokens = 1
    seq.status = SequenceStatus.WAITING
    caches.free(seq)
    audit_caches(caches, [])
    seq.token_ids[-1], seq.num_pending_tokens = 9, 0
    assert caches.admit(seq)
    assert seq.num_cached_tokens == 8


# Tokens in common


@BOTH
def test_what_was_computed_twice_has_a_checkpoint(windows: tuple[int | None, ...]) -> None:
    """The second request finds KV and no states; the third one begins there."""
    caches = make_caches(windows, num_checkpoints=6)
    system = [*range(100, 107)]
    found = [num_restored(caches, [*system, *[turn] * 6]) for turn in range(3)]
    assert found == [0, 0, 4]


@BOTH
def test_waiting_sequences_share_what_the_first_one_computes(
    windows: tuple[int | None, ...],
) -> None:
    caches = make_caches(windows, num_checkpoints=6)
    system = [*range(100, 107)]
    seqs = [make_seq([*system, *[turn] * 6]) for turn in range(3)]
    waiting = deque(seqs)
    assert caches.admit(seqs[0], waiting=waiting)
    assert caches.states.branches.lengths[seqs[0].seq_id] == {4: False}
    in_progress = {*caches.in_progress(seqs[0])}
    assert not caches.admit(seqs[1], in_progress, waiting=waiting), "it waits"
    end(caches, step(caches, seqs[0]))
    for seq in seqs[1:]:
        assert caches.admit(seq, waiting=waiting)
        assert seq.num_cached_tokens == 4
        end(caches, step(caches, seq), seqs[0], *seqs[1 : seqs.index(seq)])


@BOTH
def test_a_sequence_waits_for_a_prompt_that_is_computed_in_chunks(
    windows: tuple[int | None, ...],
) -> None:
    """It came later, and shares less than the next checkpoint; so there will be one more."""
    caches = make_caches(windows)
    seq = admit(caches, range(23))
    end(caches, step(caches, seq, 3))
    later = make_seq([*range(5), 99, 99])
    assert not caches.admit(later)
    end(caches, step(caches, seq, 7))
    assert caches.admit(later)
    assert later.num_cached_tokens == 4
    assert caches.admit(make_seq([*range(3), 98])), "it shares no block"


def test_equal_blocks_are_found_by_hashes() -> None:
    for number in range(20):
        one = make_seq(range(80))
        other = make_seq([*range(4 * number), *[99] * 30])
        for least in range(20):
            expected = number if number > least else 0
            assert num_equal_blocks(one, other, least, 4) == expected, (number, least)
    assert num_equal_blocks(make_seq(range(8)), make_seq(range(8)), 0, 4) == 1, "not the last token"


def test_few_waiting_sequences_are_compared() -> None:
    """What a step costs does not depend on how many wait."""
    caches = make_caches()
    seq, last = make_seq(range(9)), make_seq(range(9))
    waiting = deque([seq, *(make_seq([50 + i] * 9) for i in range(LOOK_AHEAD)), last])
    assert caches.admit(seq, waiting=waiting)
    assert not caches.states.branches.lengths[seq.seq_id] and not last.block_hashes


# The order


@BOTH
def test_a_shared_prompt_outlives_a_hundred_conversations(windows: tuple[int | None, ...]) -> None:
    """With seven slots in all. Each conversation has checkpoints of its prompt and its answer."""
    caches = make_caches(windows)
    system = [*range(100, 109)]
    for turn in range(3):
        run_and_free(caches, [*system, *[turn] * 6])
    for turn in range(100):
        seq = admit(caches, [turn, *range(8)])
        end(caches, step(caches, seq))
        decode(caches, seq, range(9))
        caches.free(seq)
        if turn % 5 == 4:  # so often that its KV stays, too
            assert num_restored(caches, [*system, *[turn] * 6]) == 8


def test_checkpoints_that_were_passed_go_first() -> None:
    """A conversation in two turns keeps one checkpoint, if another one needs the slots."""
    caches = make_caches(num_checkpoints=2)  # five slots, as the others are of no sequence
    run_and_free(caches, [1, 2, 3, 4, 5])
    run_and_free(caches, [7, 7, 7, 7, 7])
    run_and_free(caches, [1, 2, 3, 4, 5, 5, 5, 5, 5, 5])  # begins at 4, and passes it
    prefixes = [caches.states.checkpoints[slot] for slot in order(caches.states.checkpoints)]
    assert [prefix.token_ids[0] for prefix in prefixes] == [1, 7, 5]


def test_shared_checkpoints_go_if_there_are_only_few_others() -> None:
    checkpoints = Checkpoints()
    for slot in range(1, 6):
        checkpoints.enter(slot, Prefix(None, slot, (), []), True)
    for slot in (2, 1, 3, 4):
        checkpoints.begin(slot)
        checkpoints.begin(slot)
    assert order(checkpoints) == [2, 5, 1, 3, 4]


def test_a_checkpoint_without_kv_goes_before_others() -> None:
    checkpoints = Checkpoints()
    for slot in range(1, 5):
        checkpoints.enter(slot, Prefix(None, slot, (), [slot]), True)
    for _ in range(2):
        checkpoints.begin(3)
    assert checkpoints.next_to_drop() == 1
    checkpoints[3].blocks = ((),)
    assert checkpoints.next_to_drop() == 3


def test_the_checkpoint_of_an_interval_is_not_passed() -> None:
    checkpoints = Checkpoints()
    for slot in (1, 2, 3):
        checkpoints.enter(slot, Prefix(None, slot, (), []), slot != 2)
    for slot in (3, 2):
        checkpoints.supersede(slot)
    assert order(checkpoints) == [3, 1, 2]


def order(checkpoints: Checkpoints) -> list[int]:
    """The order in which all would be dropped; they are not."""
    copy = Checkpoints()
    copy.update(checkpoints)
    for name in ("_superseded", "_single", "_shared"):
        setattr(copy, name, getattr(checkpoints, name).copy())
    slots, prefixes = [], dict(copy)
    while copy:
        slots.append(copy.next_to_drop())
        copy.remove(slots[-1])
    for slot, prefix in prefixes.items():
        prefix.checkpoint = slot
    return slots


# Drafts of the device


@BOTH
@pytest.mark.parametrize(("count", "restored"), [(1, 0), (2, 4), (3, 4)])
def test_a_step_that_guesses_leaves_a_checkpoint_where_it_ends_a_block(
    windows: tuple[int | None, ...], count: int, restored: int
) -> None:
    """Of 3 tokens, of which `count` count, the second ends a block."""
    caches = make_caches(windows, slots_per_sequence=3)
    seq = run(caches, [1, 2])
    seq.token_ids.append(3)
    seq.num_scheduled_tokens = 1
    assert caches.grow(seq, 5) == 5
    caches.plan(batch := Batch([seq], is_prefill=False, num_drafts=2))
    assert [source for source, _ in batch.copies.after] == [seq.state_slots[3 % 3]]
    seq.token_ids += [4, 5, 6][:count]
    seq.num_cached_tokens, seq.num_scheduled_tokens = 2 + count, 0
    caches.publish(seq, 2 + count)
    caches.states.accept(seq, batch, 2, 2 + count)
    audit_caches(caches, [seq])
    caches.free(seq)
    assert num_restored(caches, [1, 2, 3, 4, 9]) == restored


def test_of_two_steps_that_guess_the_first_that_computes_a_block_has_its_checkpoint() -> None:
    """The second overwrites the slot of that length before it copies it."""
    caches = make_caches(slots_per_sequence=3)
    seq = run(caches, [1, 2])
    assert caches.grow(seq, 12) == 12
    batches = []
    for _ in range(2):
        seq.token_ids.append(-1)
        batches.append(Batch([seq], is_prefill=False, num_drafts=2))
        caches.plan(batches[-1])
        batches[-1].num_decodes = 0
        seq.num_cached_tokens += 1
        seq.num_pending_tokens += 1
        seq.num_possible_tokens += 2
    targets = [batch.copies.after[0][1] for batch in batches]
    seq.token_ids = [1, 2, 3, 4, 5, 6, 7]
    caches.publish(seq, 5)
    caches.states.accept(seq, batches[0], 2, 5)
    (slot,) = caches.states.checkpoints
    assert slot == targets[0]
    caches.states.free_slots.append(caches.states._drop(slot))  # another one needed the slot
    caches.states.accept(seq, batches[1], 5, 6)
    assert not caches.states.checkpoints
    audit_caches(caches, [seq])


def test_a_guessed_checkpoint_is_lost_with_its_sequence() -> None:
    caches = make_caches(slots_per_sequence=3)
    seq = run(caches, [1, 2])
    seq.token_ids.append(3)
    seq.num_scheduled_tokens = 1
    assert caches.grow(seq, 5) == 5
    caches.plan(Batch([seq], is_prefill=False, num_drafts=2))
    assert caches.states.guessed
    caches.free(seq)
    audit_caches(caches, [])
