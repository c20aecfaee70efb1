"""Audits: assert that queues, sequences, blocks, slots and prefixes agree. Called between steps."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanovllm.engine.cache.block_pool import BlockPool
from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.cache.checkpoints import Checkpoints
from nanovllm.engine.cache.prefixes import Prefixes
from nanovllm.engine.cache.state_prefixes import PrefixesAlone
from nanovllm.engine.cache.state_slots import StateSlots
from nanovllm.engine.schedule.admission import order
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import PENDING, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.adapters.slot_table import AdapterSlotTable


def audit_scheduler(scheduler: Scheduler) -> None:
    """Queues, sequences and caches agree."""
    waiting, running = scheduler.waiting, scheduler.running
    assert scheduler.admission.num_places_left(running) >= 0
    assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    for queue in (waiting, running):
        assert list(queue) == sorted(queue, key=order)
    for seq in (*waiting, *running):
        audit_sequence(seq)
        assert seq.room >= seq.num_cached_tokens
        assert all(s.status is SequenceStatus.WAITING for s in seq.siblings)
    audit_caches(scheduler.caches, [*running])


def audit_sequence(seq: Sequence) -> None:
    """A sequence's numbers agree."""
    assert seq.num_cached_tokens >= 0 and seq.num_scheduled_tokens >= 0, seq
    assert seq.num_cached_tokens + seq.num_scheduled_tokens <= seq.num_tokens, seq
    assert seq.token_ids.count(PENDING) == seq.num_pending_tokens, seq
    assert seq.num_prompt_tokens <= seq.num_tokens <= seq.max_num_tokens, seq
    assert bool(seq.room) == (seq.status is SequenceStatus.RUNNING), seq
    for table, start in zip(seq.block_tables, seq.num_passed_blocks, strict=True):
        assert 0 <= start <= len(table), seq
    assert not seq.siblings or seq.num_tokens == seq.num_prompt_tokens, seq


def audit_caches(caches: Caches, running: list[Sequence]) -> None:
    """Each block and each slot has an owner, given the running sequences."""
    for seq in running:
        for table, num_passed in zip(seq.block_tables, seq.num_passed_blocks, strict=True):
            assert len(table) * caches.blocks.block_size >= seq.room
            if num_passed and caches.blocks.enable_prefix_caching:
                assert num_passed < seq.num_published_blocks, "the next one's parent"
    uses: Counter[int] = Counter()
    if caches.states is not None:
        audit_slots(caches.states, running)
        prefixes = caches.states.prefixes
        tips = [p for p, _ in prefixes.tips.values()] if isinstance(prefixes, PrefixesAlone) else []
        uses = Counter(map(id, [*caches.states.checkpoints.values(), *tips]))
    audit_blocks(caches.blocks, [seq.held_blocks for seq in running], uses)


def audit_blocks(
    pool: BlockPool, block_tables: list[list[int]], others: Counter[int] | None = None
) -> None:
    """The pool's invariants hold, given the blocks in every block table.

    `others` counts uses of prefixes for other things than blocks, by their `id`.
    """
    held = Counter(block for table in block_tables for block in table)
    for table in block_tables:
        assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
    for block, ref_count in enumerate(pool.ref_counts):
        assert ref_count == held[block], f"block {block}: {ref_count} != {held[block]} tables"
        assert (block in pool.free_queue) == (ref_count == 0), f"block {block} is misplaced"
    audit_prefixes(pool.prefixes, others or Counter())
    entered = []
    for prefix in pool.prefixes:
        for group, blocks in enumerate(prefix.blocks):
            entered += [*blocks]
            assert all(pool.published[block] is prefix for block in blocks)
            assert all(pool.group_of[block] == group for block in blocks)
            free = [block for block in blocks if block in pool.free_queue]
            assert len(free) <= 1, "a prefix is cached twice"
            if blocks and pool.windows[group] is None:
                parent = prefix.parent
                assert parent is not None
                assert parent.parent is None or parent.blocks[group], "a lost parent"
    assert sorted(entered) == [b for b, p in enumerate(pool.published) if p is not None]
    is_cached = [pool.published[block] is not None for block in pool.free_queue]
    assert is_cached == sorted(is_cached), "a cached block comes before one that cannot be found"


def audit_prefixes(prefixes: Prefixes, others: Counter[int]) -> None:
    """Each prefix is in use, and found by its hash.

    `others` counts uses for other things than blocks, by the `id` of the prefix.
    """
    after: dict[int, int] = {}
    known = {id(root) for root in prefixes.roots.values()} | {id(prefix) for prefix in prefixes}
    for value, first in prefixes.by_hash.items():
        assert first.hash == value
    for prefix in prefixes:
        assert prefix.next is None or prefix.next.hash == prefix.hash
        assert id(prefix.parent) in known, "a lost parent"
        after[id(prefix.parent)] = after.get(id(prefix.parent), 0) + 1
    for prefix in prefixes:
        num_uses = sum(map(len, prefix.blocks)) + others[id(prefix)]
        assert prefix.num_uses == num_uses + after.get(id(prefix), 0) > 0, prefix
    for root in prefixes.roots.values():
        assert root.num_uses == after.get(id(root), 0) + others[id(root)], root


def audit_slots(states: StateSlots, running: list[Sequence]) -> None:
    """Each slot for states has one owner."""
    owned = [slot for seq in running for slot in (*seq.state_slots, *seq.checkpoints.values())]
    guessed = [slot for entries in states.guessed.values() for _, _, slot in entries]
    owned += [*states.checkpoints, *states.free_slots, *guessed]
    assert sorted(owned) == [*range(1, states.num_slots + 1)], owned
    assert states.num_planned == sum(len(seq.checkpoints) for seq in running) + len(guessed)
    for slot, prefix in states.checkpoints.items():
        assert prefix.checkpoint == slot
    audit_order(states.checkpoints)
    known = {seq.seq_id for seq in running}
    for by_sequence in (states.guessed, states.last, states.branches.lengths):
        assert {*by_sequence} <= known, "of a sequence that does not run"
    number = states.layout.slots_per_sequence
    for seq in running:
        assert seq.ends_in_flight or len(seq.state_slots) == number, seq


def audit_order(checkpoints: Checkpoints) -> None:
    """Each checkpoint waits in one queue to be dropped."""
    queues = [checkpoints._superseded, checkpoints._single, checkpoints._shared]
    assert sorted(slot for queue in queues for slot in queue) == sorted(checkpoints)
    assert checkpoints._begun | checkpoints._passing <= {*checkpoints}
    assert {*checkpoints._shared} <= checkpoints._begun


def audit_adapters(table: "AdapterSlotTable", running: Iterable[Sequence]) -> None:
    """Adapters' slots and sequences agree."""
    slots = [adapter.slot for adapter in table.adapters]
    assert len(set(slots)) == len(slots) <= table.num_slots
    assert all(0 <= slot < table.num_slots for slot in slots)
    assert all(seq.parts.adapter is None or seq.parts.adapter in table.adapters for seq in running)
