"""Notes of what a draft model has computed of KV blocks."""

from nanovllm import SamplingParams
from nanovllm.drafting.drafted_blocks import DraftedBlocks
from nanovllm.engine.schedule.sequence import Sequence

BLOCK_SIZE = 4


def give(seq: Sequence, blocks: list[int]) -> None:
    """Let the sequence have these blocks."""
    seq.block_tables, seq.num_passed_blocks = [blocks], [0]


def test_a_block_that_comes_back_to_its_place_may_have_fewer_tokens() -> None:
    """Two preemptions, between which other blocks were in that place."""
    drafted, seq = DraftedBlocks(BLOCK_SIZE, longest=100), Sequence([*range(12)], SamplingParams())
    give(seq, [1, 2])
    assert drafted.complete(seq, num_seen=0, end=6) == 0
    give(seq, [1, 3, 4])
    assert drafted.complete(seq, num_seen=6, end=11) == 4
    give(seq, [1, 2, 4])  # block 2 has tokens 4 and 5 only
    assert drafted.complete(seq, num_seen=11, end=11) == 4


def test_a_shorter_table_keeps_what_its_blocks_hold() -> None:
    drafted, seq = DraftedBlocks(BLOCK_SIZE, longest=100), Sequence([*range(12)], SamplingParams())
    give(seq, [1, 2])
    drafted.complete(seq, num_seen=0, end=5)
    seq.block_table.append(3)
    drafted.claim(seq, 2)
    give(seq, [1, 2])
    assert drafted.complete(seq, num_seen=5, end=7) == 5


def test_a_block_that_another_sequence_had_meanwhile_holds_nothing() -> None:
    """A sequence that was preempted gets the same blocks again."""
    drafted, seq = DraftedBlocks(BLOCK_SIZE, longest=100), Sequence([*range(12)], SamplingParams())
    give(seq, [1, 2])
    drafted.complete(seq, num_seen=0, end=6)
    other = Sequence([*range(20, 30)], SamplingParams())
    give(other, [2])
    drafted.complete(other, num_seen=0, end=3)
    assert drafted.complete(seq, num_seen=6, end=6) == 4


def test_a_full_block_after_one_that_is_not_does_not_count() -> None:
    """The block between them has the tokens that the sequence has seen."""
    drafted, seq = DraftedBlocks(BLOCK_SIZE, longest=100), Sequence([*range(12)], SamplingParams())
    twin = Sequence([*range(12)], SamplingParams())
    give(twin, [7, 8, 3])
    drafted.complete(twin, num_seen=0, end=12)
    give(seq, [1, 2])
    drafted.complete(seq, num_seen=0, end=6)
    give(seq, [1, 2, 3])
    assert drafted.complete(seq, num_seen=6, end=12) == 6
