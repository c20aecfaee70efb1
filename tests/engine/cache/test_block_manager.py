"""BlockManager: which sequence holds which block, prefix hits, and the order of eviction."""

import copy
import sys

import pytest
import xxhash
from audits import audit_blocks
from waiting import little_work

from nanovllm.engine.cache import prefixes
from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.prefixes import hash_block
from nanovllm.engine.cache.windows import WindowedBlocks
from nanovllm.engine.schedule.sequence import PENDING, Sequence
from nanovllm.engine.start.sizing import longest_sequence
from nanovllm.sampling_params import SamplingParams


def admit(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """A sequence with blocks for all its tokens; only the hits are computed."""
    seq = Sequence(token_ids, SamplingParams())
    assert manager.allocate(seq)
    return seq


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Mark the KV of the first `num_tokens` tokens (default: all) as computed."""
    seq.num_cached_tokens = seq.num_tokens if num_tokens is None else num_tokens
    manager.publish(seq, seq.num_cached_tokens)


def run(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """A sequence whose tokens are all computed."""
    seq = admit(manager, token_ids)
    assert manager.grow(seq, seq.num_tokens) == seq.num_tokens
    compute(manager, seq)
    return seq


def run_and_free(manager: BlockManager, token_ids: list[int]) -> list[int]:
    """Compute a sequence, free it, and return the blocks that it had."""
    seq = run(manager, token_ids)
    table = seq.block_table
    manager.free(seq)
    return table


def num_hits(manager: BlockManager, token_ids: list[int]) -> int:
    """How many blocks of the prompt would be hits now; changes nothing."""
    other = copy.deepcopy(manager)
    return admit(other, token_ids).num_cached_tokens // manager.block_size


def snapshot(manager: BlockManager) -> str:
    """All state, with the order of the free queue, which dicts ignore when compared."""
    return repr(vars(manager))


@pytest.mark.parametrize(("num_tokens", "left"), [(12, 3), (9, 3), (8, 2), (1, 1), (0, 0)])
def test_shrinking_keeps_the_blocks_of_the_first_tokens(num_tokens: int, left: int) -> None:
    """The rest are free, and the table is another list."""
    manager = BlockManager(num_blocks=4, block_size=4)
    seq = admit(manager, list(range(12)))
    table = seq.block_table
    manager.shrink(seq, num_tokens)
    assert seq.block_table == table[:left] and (seq.block_table is table) == (left == 3)
    assert manager.num_free_blocks == 4 - left
    audit_blocks(manager, [seq.block_table])


# Hashes


def test_hash_is_xxh64_of_parent_and_tokens() -> None:
    """With fixed integer sizes, whatever the platform."""
    first = xxhash.xxh64_intdigest(bytes.fromhex("0000000000000000 01000000 02000000"))
    assert hash_block(0, [1, 2]) == first
    second = xxhash.xxh64_intdigest(first.to_bytes(8, "little") + bytes.fromhex("03000000"))
    assert hash_block(first, [3]) == second


def test_a_blocks_hash_depends_on_all_blocks_before() -> None:
    """Equal tokens after different prefixes have different hashes."""
    manager = BlockManager(8, 2)
    first, second, _ = run(manager, [1, 2, 5, 6, 0]).block_table
    assert manager.published[first].hash == hash_block(0, [1, 2])
    assert manager.published[second].hash == hash_block(hash_block(0, [1, 2]), [5, 6])
    assert num_hits(manager, [1, 2, 5, 6, 0]) == 2
    assert num_hits(manager, [3, 4, 5, 6, 0]) == 0
    assert num_hits(manager, [1, 2, 1, 2, 0]) == 1
    assert num_hits(manager, [5, 6, 0]) == 0


def test_collision_of_different_tokens_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are compared, too: [3, 4] must not get the KV of [1, 2]."""
    monkeypatch.setattr(prefixes, "hash_block", lambda parent, token_ids: 42)
    manager = BlockManager(8, 2)
    one = run(manager, [1, 2, 0])
    other = run(manager, [3, 4, 0])
    audit_blocks(manager, [one.block_table, other.block_table])
    assert one.block_table[0] not in admit(manager, [3, 4, 0]).block_table
    assert admit(manager, [1, 2, 0]).block_table[0] == one.block_table[0]
    assert num_hits(manager, [5, 6, 0]) == 0


def test_collision_of_equal_tokens_after_different_prefixes_is_no_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens before a block are compared, too, not just its own.

    Where [1, 2] and [3, 4] collide, so do all blocks chained to them: the [5, 6] after [1, 2] and
    the [5, 6] after [3, 4] have one hash and the same tokens, but different KV.
    """
    weak = {1: 7, 3: 7, 5: 8}
    monkeypatch.setattr(prefixes, "hash_block", lambda parent, token_ids: weak[token_ids[0]])
    manager = BlockManager(8, 2)
    one = run(manager, [1, 2, 5, 6, 0])
    run(manager, [3, 4, 5, 6, 0])
    hit = admit(manager, [3, 4, 5, 6, 0])
    assert one.block_table[1] not in hit.block_table


def test_collision_along_one_prompt_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that repeats itself must not hit its first block as its second."""
    monkeypatch.setattr(prefixes, "hash_block", lambda parent, token_ids: 42)
    manager = BlockManager(8, 2)
    first = run(manager, [1, 2, 1, 2, 0])
    again = admit(manager, [1, 2, 1, 2, 0])
    audit_blocks(manager, [first.block_table, again.block_table])


# What is published


def test_only_computed_full_blocks_are_found() -> None:
    """A block that is allocated but not computed must not be a hit."""
    manager = BlockManager(16, 2)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    seq = admit(manager, prompt)
    found = [num_hits(manager, prompt)]
    for num_tokens in range(1, 8):
        compute(manager, seq, num_tokens)
        found.append(num_hits(manager, prompt))
    assert found == [0, 0, 1, 1, 2, 2, 3, 3]


def test_generated_tokens_are_found_as_well() -> None:
    """The second turn of a chat hits the answer of the first."""
    manager = BlockManager(8, 2)
    seq = run(manager, [1, 2, 3])
    seq.token_ids += [4, 5]
    manager.append_blocks(seq)
    compute(manager, seq)
    assert num_hits(manager, [1, 2, 3, 4, 5]) == 2


def test_publishing_twice_is_publishing_once() -> None:
    """A block must not be listed twice under its hash."""
    manager = BlockManager(4, 2)
    seq = run(manager, [1, 2, 3])
    before = snapshot(manager)
    manager.publish(seq, seq.num_cached_tokens)
    assert snapshot(manager) == before
    audit_blocks(manager, [seq.block_table])


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "hits"),
    [(2, 2, 0), (2, 3, 1), (2, 4, 1), (2, 5, 2), (1, 1, 0), (1, 2, 1), (1, 4, 3), (4, 4, 0),
     (4, 5, 1), (4, 8, 1), (4, 9, 2), (16, 16, 0), (16, 17, 1)],
)  # fmt: skip
def test_the_last_token_is_never_a_hit(block_size: int, num_tokens: int, hits: int) -> None:
    """At least one token must be computed, to get logits."""
    manager = BlockManager(32, block_size)
    prompt = list(range(num_tokens))
    run(manager, prompt)
    seq = admit(manager, prompt)
    assert seq.num_cached_tokens == hits * block_size == (num_tokens - 1) // block_size * block_size
    assert seq.num_uncached_tokens >= 1


def test_hits_are_shared_and_counted() -> None:
    """The first to finish must not free what the other still reads."""
    manager = BlockManager(6, 2)
    one = run(manager, [1, 2, 3, 4, 5])
    other = admit(manager, [1, 2, 3, 4, 6])
    assert (one.block_table, other.block_table) == ([0, 1, 2], [0, 1, 3])
    assert manager.ref_counts == [2, 2, 1, 1, 0, 0]
    manager.free(one)
    assert manager.ref_counts == [1, 1, 0, 1, 0, 0]
    assert manager.num_free_blocks == 3
    audit_blocks(manager, [other.block_table])
    manager.free(other)
    assert manager.num_free_blocks == 6
    audit_blocks(manager, [])


def test_first_hits_are_kept_for_the_report() -> None:
    """Hits of a preempted request on its own blocks are not reported as cached prompt tokens."""
    manager = BlockManager(8, 2)
    seq = run(manager, [1, 2, 3, 4, 5])
    manager.free(seq)
    assert manager.allocate(seq)
    assert (seq.num_hit_tokens, seq.num_cached_tokens) == (0, 4)
    assert admit(manager, [1, 2, 9]).num_hit_tokens == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    """Nor is anything recorded under a hash."""
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    run_and_free(manager, [1, 2, 3, 4, 5])
    assert (num_hits(manager, [1, 2, 3, 4, 5]), manager.prefixes.by_hash) == (0, {})
    assert manager.num_free_blocks == 8
    audit_blocks(manager, [])


# The free queue


@pytest.mark.parametrize(("num_evicted", "hits"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_tail_is_evicted_before_prefix(num_evicted: int, hits: int) -> None:
    """Each eviction costs one hit: without its first block a prompt has none."""
    manager = BlockManager(4, 2)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    run_and_free(manager, prompt)
    for token_id in range(90, 90 + num_evicted):
        admit(manager, [token_id])
    assert num_hits(manager, prompt[: 2 * manager.num_free_blocks]) == hits


def test_eviction_order() -> None:
    """Least recently used first: old before new, tail before prefix."""
    manager = BlockManager(5, 2)
    old = run_and_free(manager, [1, 2, 3, 4, 5])
    new = run_and_free(manager, [6, 7, 8, 9, 10])
    assert (old, new) == ([0, 1, 2], [2, 3, 4])  # 2 and 4 are partly filled
    assert [admit(manager, [n]).block_table[0] for n in range(90, 95)] == [4, 1, 0, 3, 2]


def test_blocks_are_allocated_in_the_order_of_what_they_cost() -> None:
    """Those that no request can find, last freed first; new memory; then what may be found."""
    manager = BlockManager(9, 2)
    seqs = [run(manager, [1, 2, 0]), run(manager, [90]), run(manager, [91])]
    for seq in seqs:
        manager.free(seq)
    assert list(manager.free_queue) == [3, 2, 1, 4, 5, 6, 7, 8, 0]
    audit_blocks(manager, [])


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_prompts_shorter_than_a_block_share_one_block_after_another(
    enable_prefix_caching: bool,
) -> None:
    """A pool of a thousand blocks is not touched for them."""
    manager = BlockManager(1000, 4, enable_prefix_caching)
    tables = [run_and_free(manager, [token_id] * 3) for token_id in range(100)]
    assert tables == [[0]] * 100


def test_without_prefix_caching_full_blocks_are_reused_first_as_well() -> None:
    manager = BlockManager(1000, 2, enable_prefix_caching=False)
    tables = [run_and_free(manager, [token_id] * 6) for token_id in range(100)]
    assert tables == [[0, 1, 2]] * 100


def test_new_memory_is_used_before_a_cached_block_is_evicted() -> None:
    """A larger pool has a higher hit rate."""
    manager = BlockManager(50, 2)
    for token_id in range(49):
        run_and_free(manager, [token_id, 0, 1])
    assert [num_hits(manager, [token_id, 0, 1]) for token_id in range(49)] == [1] * 49


def test_a_hit_makes_a_block_recent() -> None:
    """So that a busy system prompt is not evicted."""
    manager = BlockManager(4, 2)
    run_and_free(manager, [1, 2, 0])  # blocks 0, 1; queue 1, 2, 3, 0
    run_and_free(manager, [5, 6, 0])  # blocks 1, 2; queue 2, 3, 0, 1
    hit = run(manager, [1, 2, 7])  # block 0 again, and 2; queue 3, 1
    assert hit.block_table == [0, 2]
    manager.free(hit)  # queue 2, 3, 1, 0
    assert [admit(manager, [n]).block_table[0] for n in (90, 91)] == [2, 3]
    assert run(manager, [1, 2, 7]).block_table == [0, 1]


def test_hits_come_out_of_the_middle_of_the_queue() -> None:
    """A block in use must not stay in the queue."""
    manager = BlockManager(6, 2)
    run_and_free(manager, [1, 2, 3, 4, 0])  # blocks 0, 1, 2
    run_and_free(manager, [5, 6, 0])  # blocks 2, 3
    assert list(manager.free_queue) == [3, 4, 5, 1, 0, 2]
    seq = admit(manager, [1, 2, 3, 4, 9])  # takes 0 and 1 out of the middle, 3 from the head
    assert seq.block_table == [0, 1, 3]
    assert list(manager.free_queue) == [4, 5, 2]
    audit_blocks(manager, [seq.block_table])


def test_taking_hits_does_not_depend_on_the_length_of_the_queue() -> None:
    """2,000 hits behind 100,000 free blocks take milliseconds, not seconds as from a deque."""
    manager = BlockManager(100_000, 1)
    prompt = list(range(2000))
    run_and_free(manager, prompt)
    with little_work(0.5):
        assert admit(manager, prompt).num_cached_tokens == 1999


def test_an_evicted_block_is_not_found() -> None:
    """The hash must not outlive the block's content."""
    manager = BlockManager(2, 2)
    run_and_free(manager, [1, 2, 0])
    seq = run(manager, [3, 4, 0])
    assert sorted(seq.block_table) == [0, 1]
    manager.free(seq)
    assert num_hits(manager, [1, 2, 0]) == 0
    assert num_hits(manager, [3, 4, 0]) == 1


# Duplicates


def side_by_side(manager: BlockManager) -> tuple[Sequence, Sequence]:
    """Two sequences that computed the same prompt in the same step."""
    one, other = admit(manager, [1, 2, 0]), admit(manager, [1, 2, 0])
    compute(manager, one)
    compute(manager, other)
    assert not set(one.block_table) & set(other.block_table)
    audit_blocks(manager, [one.block_table, other.block_table])
    return one, other


@pytest.mark.parametrize("first_out", [0, 1])
def test_evicting_a_duplicate_does_not_hide_the_other(first_out: int) -> None:
    """A hash may have several blocks; the other one is still found."""
    manager = BlockManager(4, 2)
    pair = side_by_side(manager)
    gone, kept = pair[first_out], pair[1 - first_out]
    table = gone.block_table
    manager.free(gone)
    evictors = [admit(manager, [90]), admit(manager, [91])]
    assert sorted(evictor.block_table[0] for evictor in evictors) == sorted(table)
    manager.free(evictors[0])
    hit = admit(manager, [1, 2, 9])
    assert hit.block_table[0] == kept.block_table[0]
    audit_blocks(manager, [s.block_table for s in (kept, evictors[1], hit)])


def test_when_all_duplicates_are_evicted_nothing_is_found() -> None:
    """The hash's entry is removed with its last block."""
    manager = BlockManager(4, 2)
    for seq in side_by_side(manager):
        manager.free(seq)
    assert num_hits(manager, [1, 2, 9]) == 1
    evictors = [admit(manager, [token_id]) for token_id in range(90, 94)]
    audit_blocks(manager, [evictor.block_table for evictor in evictors])
    for evictor in evictors:
        manager.free(evictor)
    assert num_hits(manager, [1, 2, 9]) == 0
    assert manager.prefixes.by_hash == {}


def test_a_prompt_of_full_blocks_keeps_one_copy_of_its_last_block() -> None:
    """The last block is computed each time. Its copies make one entry of the cache, and recent."""
    manager = BlockManager(4, 2)
    assert [run_and_free(manager, [1, 2]) for _ in range(5)] == [[0], [1], [1], [1], [1]]
    run_and_free(manager, [3, 4])
    run_and_free(manager, [1, 2])
    assert list(manager.free_queue) == [2, 3, 1, 0]
    assert num_hits(manager, [1, 2, 9]) == 1


def test_a_freed_duplicate_leaves_the_cache_at_once() -> None:
    """The other one is found."""
    manager = BlockManager(8, 2)
    one, other = side_by_side(manager)
    table = one.block_table
    manager.free(one)
    assert list(manager.free_queue)[:2] == table and manager.published[table[0]] is None
    assert admit(manager, [1, 2, 9]).block_table[0] == other.block_table[0]


def test_a_freed_duplicate_makes_the_cached_block_recent() -> None:
    """Evicted before what follows, it would hide that."""
    manager = BlockManager(8, 2)
    run_and_free(manager, [1, 2])  # block 0
    seq = run(manager, [1, 2])  # block 1
    run_and_free(manager, [5, 6])  # block 2
    seq.token_ids += [3, 4]
    manager.append_blocks(seq)  # block 3
    compute(manager, seq)
    manager.free(seq)
    assert list(manager.free_queue) == [1, 4, 5, 6, 7, 2, 3, 0]
    assert num_hits(manager, [1, 2, 3, 4, 9]) == 2
    audit_blocks(manager, [])


# Allocations that are refused


def test_free_hits_count_against_the_free_blocks() -> None:
    """Two hits fill a queue of two, and a third block is needed: the request is refused."""
    manager = BlockManager(3, 2)
    run_and_free(manager, [1, 2, 3, 4, 5])
    other = admit(manager, [9])
    assert (other.block_table, list(manager.free_queue)) == ([2], [1, 0])
    before = snapshot(manager)
    seq = Sequence([1, 2, 3, 4, 5], SamplingParams())
    assert not manager.allocate(seq)
    assert snapshot(manager) == before
    audit_blocks(manager, [other.block_table])


def test_used_hits_do_not_count_against_the_free_blocks() -> None:
    """Shared blocks need no free block."""
    manager = BlockManager(4, 2)
    one = run(manager, [1, 2, 3, 4, 5])
    seq = admit(manager, [1, 2, 3, 4, 6])
    assert (one.block_table, seq.block_table, manager.num_free_blocks) == ([0, 1, 2], [0, 1, 3], 0)


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 9], [1, 2, 9, 9, 9], [9] * 5, [9] * 50])
def test_refusal_changes_nothing(prompt: list[int]) -> None:
    """No reference and no block is taken."""
    manager = BlockManager(5, 2)
    run_and_free(manager, [1, 2, 3, 4, 5])
    other = admit(manager, [7, 7, 7, 7, 7])
    before = snapshot(manager)
    seq = Sequence(prompt, SamplingParams())
    for _ in range(3):
        assert not manager.allocate(seq)
    assert snapshot(manager) == before
    assert (seq.block_table, seq.num_cached_tokens, seq.num_hit_tokens) == ([], 0, None)
    assert seq.num_published_blocks == 0
    manager.free(other)
    assert manager.num_free_blocks == 5


def test_exactly_what_is_free_is_given() -> None:
    """Also the last block."""
    manager = BlockManager(3, 4)
    seq = admit(manager, list(range(12)))
    assert (seq.block_table, manager.num_free_blocks) == ([0, 1, 2], 0)
    assert not manager.allocate(Sequence([1], SamplingParams()))
    manager.free(seq)
    assert not manager.allocate(Sequence(list(range(13)), SamplingParams()))
    assert manager.num_free_blocks == 3


# The audit


def test_free_resets_the_sequence() -> None:
    """A preempted sequence has no KV any more."""
    manager = BlockManager(4, 2)
    seq = run(manager, [1, 2, 3])
    seq.num_scheduled_tokens = 1
    manager.free(seq)
    assert seq.block_table == []
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.num_published_blocks) == (0, 0, 0)


@pytest.mark.parametrize("damage", ["leak", "both", "neither", "twice", "stale", "hidden"])
def test_audit_finds(damage: str) -> None:
    """Every block is free or used, and every hash leads to its blocks."""
    manager = BlockManager(4, 2)
    seq = run(manager, [1, 2, 3])
    tables = [seq.block_table]
    audit_blocks(manager, tables)
    if damage == "leak":  # held by no table, and never free again
        manager.ref_counts[3] = 1
        del manager.free_queue[3]
    elif damage == "both":  # free and used at once
        manager.free_queue[0] = None
    elif damage == "neither":  # lost
        del manager.free_queue[3]
    elif damage == "twice":
        tables = [[0, 1, 1]]
        manager.ref_counts[1] = 2
    elif damage == "stale":  # evicted, and still to be found
        manager.published[0] = None
    else:  # published, and not to be found
        manager.prefixes.by_hash.clear()
    with pytest.raises(AssertionError):
        audit_blocks(manager, tables)


# Forks


@pytest.mark.parametrize(("num_tokens", "num_shared", "num_own"), [(3, 0, 1), (8, 2, 0), (9, 2, 1)])
def test_a_fork_shares_full_blocks_and_owns_its_tail(
    num_tokens: int, num_shared: int, num_own: int
) -> None:
    """Two sequences must not write into one block, nor publish one twice."""
    manager = BlockManager(8, 4)
    seq = admit(manager, list(range(num_tokens)))
    sibling = Sequence(list(range(num_tokens)), SamplingParams())
    free = manager.num_free_blocks
    assert manager.fork(seq, sibling)
    assert manager.num_free_blocks == free - num_own
    assert sibling.block_table[:num_shared] == seq.block_table[:num_shared]
    assert not set(sibling.block_table[num_shared:]) & set(seq.block_table)
    assert len(sibling.block_table) == num_shared + num_own
    compute(manager, seq)
    compute(manager, sibling)  # publishes nothing again
    audit_blocks(manager, [seq.block_table, sibling.block_table])
    manager.free(seq)
    assert num_hits(manager, [*range(num_tokens), 99]) == num_shared
    sibling.token_ids += [50] * 4  # and then what it adds itself
    while len(sibling.block_table) * 4 < sibling.num_tokens:
        manager.append_blocks(sibling)
    compute(manager, sibling)
    assert num_hits(manager, [*sibling.token_ids, 99]) == (num_tokens + 4) // 4
    manager.free(sibling)
    audit_blocks(manager, [])
    assert manager.num_free_blocks == 8


def test_a_fork_publishes_no_block_that_its_sequence_must_not_publish() -> None:
    """The cache was emptied while the prompt's only block was in use, by new weights perhaps."""
    manager = BlockManager(8, 4)
    seq = run(manager, [1, 2, 3])
    manager.clear()
    seq.num_published_blocks = 1  # by `Scheduler.clear_cache`
    sibling = Sequence([1, 2, 3], SamplingParams())
    assert manager.fork(seq, sibling)
    for token_id in range(4, 9):
        sibling.token_ids.append(token_id)
    assert manager.grow(sibling, 8) == 8
    compute(manager, sibling)
    assert num_hits(manager, list(range(1, 9))) == 0


def test_a_fork_without_room_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    seq = admit(manager, list(range(6)))
    before = snapshot(manager)
    sibling = Sequence(list(range(6)), SamplingParams())
    assert not manager.fork(seq, sibling)
    assert snapshot(manager) == before and sibling.block_table == []


# Windows


def windowed(num_blocks: int, window: int, block_size: int = 2) -> BlockManager:
    return WindowedBlocks(num_blocks, block_size, windows=(window,))


@pytest.mark.parametrize(
    ("window", "block_size", "num_cached", "passed"),
    [
        (6, 2, 6, 0),  # token 6 sees 1 and what follows: block 0 ends with it
        (6, 2, 7, 1),  # token 7 sees 2 and what follows
        (6, 2, 8, 1),
        (6, 2, 9, 2),
        (1, 1, 2, 0),  # three tokens at least: one is the next block's parent
        (1, 1, 3, 1),
        (1, 4, 8, 0),  # six at least
        (1, 4, 9, 1),
        (4096, 16, 4110, 0),
        (4096, 16, 4111, 1),
    ],
)
def test_a_block_is_freed_exactly_when_the_window_has_passed_it(
    window: int, block_size: int, num_cached: int, passed: int
) -> None:
    """Blocks that the next token sees are kept, the others are freed."""
    manager = windowed(600, window, block_size)
    seq = admit(manager, list(range(num_cached)))
    table = list(seq.block_table)
    seq.num_cached_tokens = num_cached
    manager.pass_by(seq)
    assert (seq.num_passed_blocks[0], seq.block_table) == (passed, table)
    assert [manager.ref_counts[block] for block in table] == [
        int(index >= passed) for index in range(len(table))
    ]
    audit_blocks(manager, [seq.held_blocks])
    manager.free(seq)
    assert manager.num_free_blocks == 600 and seq.num_passed_blocks == []
    audit_blocks(manager, [])


def test_blocks_behind_the_window_are_found_until_evicted() -> None:
    """They are published before they are freed, and evicted in order."""
    manager = windowed(12, window=4)
    prompt = list(range(9))
    seq = admit(manager, prompt)
    seq.num_cached_tokens = 9
    manager.pass_by(seq)
    assert (seq.num_passed_blocks[0], manager.num_free_blocks) == (3, 10)
    assert num_hits(manager, prompt) == 4
    evictors = [admit(manager, [token_id]) for token_id in range(90, 98)]
    assert evictors[7].block_table == [2], "last first: the third of the three"
    for evictor in evictors[:7]:
        manager.free(evictor)
    assert num_hits(manager, prompt) == 2


def test_a_block_with_a_pending_token_is_not_published() -> None:
    """Its hash would be that of a placeholder."""
    manager = windowed(8, window=1)
    seq = admit(manager, list(range(5)))
    seq.token_ids += [PENDING]
    seq.num_pending_tokens, seq.num_cached_tokens = 1, 6
    manager.pass_by(seq)
    assert (seq.num_passed_blocks[0], seq.num_published_blocks) == (1, 2)
    assert num_hits(manager, [*range(5), PENDING, 9]) == 2


def test_hits_behind_the_window_are_not_taken() -> None:
    """Only hits in the window are held; a pool of cached blocks has room for the next one."""
    manager = windowed(8, window=4)
    prompt = list(range(16))
    run_and_free(manager, prompt)
    seq = admit(manager, [*prompt, 99])
    assert (seq.num_cached_tokens, seq.num_passed_blocks[0]) == (16, 6)
    assert manager.num_free_blocks == 5, "two hits and a block for the last token"
    audit_blocks(manager, [seq.held_blocks])
    assert num_hits(manager, prompt) == 5, "a tail is evicted before its prefix"


def test_hits_behind_the_window_become_recent() -> None:
    """A busy prefix is kept although no window reaches back to it."""
    manager = windowed(16, window=4)
    busy, other = list(range(12)), list(range(50, 62))
    run_and_free(manager, busy)
    run_and_free(manager, other)
    seq = admit(manager, [*busy, 99])
    for token_id in range(90, 95):
        admit(manager, [token_id])
    assert (num_hits(manager, [*busy, 98]), num_hits(manager, other)) == (6, 4)
    assert seq.num_passed_blocks[0] == 4


def test_with_a_window_the_tail_is_evicted_before_the_prefix() -> None:
    """The prefix is freed first; evicted first, it would leave blocks that cannot be found."""
    manager = windowed(9, window=4)
    prompt = list(range(12))
    seq = admit(manager, prompt)
    for end in range(2, 13, 2):
        seq.num_cached_tokens = manager.grow(seq, end)
        manager.pass_by(seq)
    manager.free(seq)
    for num_evicted in range(10):
        other = copy.deepcopy(manager)
        for evictor in [admit(other, [token_id]) for token_id in range(90, 90 + num_evicted)]:
            other.free(evictor)
        assert num_hits(other, [*prompt, 99]) == min(6, 9 - num_evicted)


def test_generated_blocks_behind_the_window_are_reused_first() -> None:
    """A sequence longer than the pool evicts nothing but its own output."""
    manager = windowed(14, window=4)
    seq, other = admit(manager, list(range(6))), list(range(50, 58))
    for turn in range(100):
        seq.token_ids.append(0)
        seq.num_cached_tokens = manager.grow(seq, seq.num_tokens)
        manager.pass_by(seq)
        audit_blocks(manager, [seq.held_blocks])
        if turn == 5:
            run_and_free(manager, other)
    assert num_hits(manager, [*range(6), 99]) == 3
    assert num_hits(manager, [*other, 99]) == 4
    manager.free(seq)
    audit_blocks(manager, [])
    assert num_hits(manager, [*other, 99]) == 4


@pytest.mark.parametrize("num_tokens", [30, 31])
@pytest.mark.parametrize("window", [1, 4, 5])
def test_a_long_answer_is_found_up_to_its_last_full_block(num_tokens: int, window: int) -> None:
    """Also where the sequence itself has passed a block that the next token after it reads."""
    manager = windowed(20, window)
    seq = admit(manager, [1, 2, 3])
    while seq.num_tokens < num_tokens:
        seq.token_ids.append(seq.num_tokens)
        compute(manager, seq, manager.grow(seq, seq.num_tokens))
        manager.pass_by(seq)
    assert manager.published.count(None) > 12, "the blocks before are reused first"
    manager.free(seq)
    assert num_hits(manager, [*seq.token_ids, 99]) == num_tokens // 2


def test_blocks_after_an_evicted_prefix_are_found() -> None:
    """Only those in the window of the next token are needed."""
    manager = windowed(7, window=4)
    seq = admit(manager, list(range(12)))
    for end in range(2, 13, 2):
        seq.num_cached_tokens = manager.grow(seq, end)
        manager.pass_by(seq)
    evictors = [admit(manager, [90 + index]) for index in range(manager.num_free_blocks)]
    for evictor in evictors:
        manager.free(evictor)
    assert num_hits(manager, [*range(4), 99]) == 0
    seq.token_ids += [1, 2]
    seq.num_cached_tokens = manager.grow(seq, 14)
    manager.publish(seq, 14)
    audit_blocks(manager, [seq.held_blocks])
    assert num_hits(manager, [*seq.token_ids, 99]) == 7


# Several groups


MIXED = (None, 4, 4)


def most_held(windows: tuple[int | None, ...], block_size: int) -> list[int]:
    return [WindowedBlocks.most_held(window, block_size) for window in windows]


def test_each_group_has_a_table_of_blocks_of_its_own() -> None:
    """The blocks come from one pool."""
    manager = WindowedBlocks(20, 2, windows=MIXED)
    seq = run(manager, list(range(7)))
    assert [len(table) for table in seq.block_tables] == [4, 4, 4] and seq.room == 8
    assert manager.num_free_blocks == 8 and len(set(seq.held_blocks)) == 12
    audit_blocks(manager, [seq.held_blocks])
    manager.free(seq)
    assert manager.num_free_blocks == 20 and seq.room == 0
    audit_blocks(manager, [])


def test_only_groups_with_a_window_free_what_is_behind_it() -> None:
    """A token more than the window is kept, as one alone."""
    manager = WindowedBlocks(40, 2, windows=MIXED)
    seq = run(manager, list(range(16)))
    manager.pass_by(seq)
    assert seq.num_passed_blocks == [0, 6, 6]
    assert manager.num_free_blocks == 40 - 8 - 2 - 2
    audit_blocks(manager, [seq.held_blocks])


def test_a_prefix_is_found_where_all_groups_have_what_the_next_token_reads() -> None:
    """Where one group lacks a block in its window, an earlier prefix is taken."""
    manager = WindowedBlocks(40, 2, windows=MIXED)
    prompt = list(range(12))
    seq = run(manager, prompt)
    tables = [list(table) for table in seq.block_tables]
    manager.free(seq)
    assert num_hits(manager, [*prompt, 99]) == 6
    manager._unpublish(tables[1][5])  # the last block of a group with a window
    audit_blocks(manager, [])
    assert num_hits(manager, [*prompt, 99]) == 5
    manager._unpublish(tables[2][2])  # from here on two more blocks are needed
    audit_blocks(manager, [])
    assert num_hits(manager, [*prompt, 99]) == 5
    manager._unpublish(tables[1][3])
    assert num_hits(manager, [*prompt, 99]) == 2
    manager._unpublish(tables[0][1])  # without a window all blocks are needed
    assert num_hits(manager, [*prompt, 99]) == 1


def test_a_hit_holds_in_each_group_what_the_next_token_reads() -> None:
    """Blocks behind the window stay free."""
    manager = WindowedBlocks(40, 2, windows=MIXED)
    first = run(manager, list(range(12)))
    tables = [list(table) for table in first.block_tables]
    manager.free(first)
    seq = admit(manager, [*range(12), 99])
    assert (seq.num_cached_tokens, seq.num_passed_blocks) == (12, [0, 4, 4])
    assert [
        table[start:-1]
        for table, start in zip(seq.block_tables, seq.num_passed_blocks, strict=True)
    ] == [tables[0], tables[1][4:], tables[2][4:]]
    assert manager.num_free_blocks == 40 - 7 - 3 - 3
    audit_blocks(manager, [seq.held_blocks])


def test_growing_gives_all_groups_a_block_or_none() -> None:
    """Two blocks are no help to three tables."""
    manager = WindowedBlocks(11, 2, windows=MIXED)
    seq = admit(manager, list(range(6)))
    assert manager.num_free_blocks == 2 and manager.grow(seq, 8) == 6
    assert manager.num_free_blocks == 2
    audit_blocks(manager, [seq.held_blocks])


def test_a_long_prompt_alone_in_the_smallest_pool_is_computed() -> None:
    """It has the blocks of two windows at first, and of one where there is no room for two."""
    length = longest_sequence(18, 2, most_held(MIXED, 2))
    assert length == 24  # twelve blocks, and three for each window
    manager = WindowedBlocks(18, 2, windows=MIXED)
    seq = admit(manager, list(range(length)))
    while seq.num_cached_tokens < length:
        end = manager.grow(seq, seq.num_cached_tokens + 3)
        assert end > seq.num_cached_tokens
        seq.num_cached_tokens = min(end, length)
        manager.pass_by(seq)
        audit_blocks(manager, [seq.held_blocks])


def test_a_fork_shares_the_blocks_of_all_groups() -> None:
    manager = WindowedBlocks(40, 4, windows=MIXED)
    seq = admit(manager, list(range(10)))
    sibling = Sequence(list(range(10)), SamplingParams())
    free = manager.num_free_blocks
    assert manager.fork(seq, sibling) and manager.num_free_blocks == free - 3
    compute(manager, seq)
    audit_blocks(manager, [seq.held_blocks, sibling.held_blocks])
    manager.free(seq)
    audit_blocks(manager, [sibling.held_blocks])
    manager.free(sibling)
    assert manager.num_free_blocks == 40


def test_a_long_prompt_gets_blocks_for_two_windows() -> None:
    """All of its blocks at once may be more than the pool has."""
    manager = windowed(20, window=8)
    seq = admit(manager, list(range(100)))
    assert len(seq.block_table) == 9  # 16 tokens that begin anywhere
    assert manager.grow(seq, 24) == 24 and len(seq.block_table) == 12
    assert manager.grow(seq, 70) == 40 and not manager.num_free_blocks
    assert manager.grow(seq, 10) == 10


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "window", "expected"),
    [
        (10, 16, None, 160),
        (3, 4, 10, 12),
        (4, 4, 10, sys.maxsize),  # 10 tokens lie in 4 blocks at most: 1, 4, 4, 1
        (2, 4, 1, 8),
        (3, 4, 1, sys.maxsize),  # 6 in 3
        (257, 16, 4096, sys.maxsize),
        (256, 16, 4096, 4096),
    ],
)
def test_longest_sequence(
    num_blocks: int, block_size: int, window: int | None, expected: int
) -> None:
    assert longest_sequence(num_blocks, block_size, most_held((window,), block_size)) == expected
