"""StateSlots: which slots have the states of running sequences, and which have checkpoints.

It knows slot numbers and prefixes, and no tensors.
"""

from collections import OrderedDict
from typing import NamedTuple

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.prefixes import Prefix, block_hashes, block_tokens
from nanovllm.engine.schedule.batch import Batch, SlotCopies
from nanovllm.engine.schedule.sequence import Sequence

NUM_RESERVED = 2  # the first slot and the last one


class StateLayout(NamedTuple):
    """How many slots a rank has, and what for."""

    slots_per_sequence: int  # of a running sequence: one, and one for each draft
    num_checkpoints: int
    interval: int  # tokens from one checkpoint of a sequence to the next

    def num_slots(self, num_running: int) -> int:
        """All slots, including the reserved ones."""
        return NUM_RESERVED + self.slots_per_sequence * num_running + self.num_checkpoints


class StateSlots:
    """The slots of a model's states. A slot has the states of all layers after one token.

    The state after the token at position p is in slot p % `slots_per_sequence` of the sequence's
    own slots. So a draft's state does not overwrite the state of the token before the drafts, and
    the state after a wrong draft is overwritten by that of the right token. The first slot stays
    zeroed, for sequences that begin; states that are not kept are written to the last slot.

    Other slots have checkpoints: copies of the states after a prefix, which restore a sequence that
    begins with this prefix. They are made every `interval` tokens, and at the end of a prompt's
    last full block. If no slot is free, the least recently used checkpoint is dropped. So a
    running sequence always gets its own slots.

    With KV blocks, a checkpoint's prefix is that of a published block. Without, `_tips` has the
    last prefix that each running sequence has entered, and so keeps it in use.
    """

    def __init__(self, layout: StateLayout, num_running: int, blocks: BlockManager) -> None:
        self.layout = layout
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.prefixes = blocks.prefixes
        self._tips: dict[int, tuple[Prefix, int]] = {}  # with numbers of blocks, by `seq_id`
        self.free_slots = [*range(1, layout.num_slots(num_running) - 1)][::-1]
        self.num_slots = len(self.free_slots)
        self.checkpoints: OrderedDict[int, Prefix] = OrderedDict()  # by slot, oldest use first
        self.num_planned = 0  # checkpoints of steps that may not be computed yet
        self._restores: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []

    def counts(self) -> tuple[int, int, int]:
        """How many slots running sequences have, how many have checkpoints, and how many exist."""
        num_free = len(self.free_slots) + len(self.checkpoints) + self.num_planned
        return self.num_slots - num_free, len(self.checkpoints), self.num_slots

    def begin(self, seq: Sequence) -> None:
        """Give `seq` slots; before the step, the states of its cached prefix are copied to them."""
        prefix = self._begun_prefix(seq)
        checkpoint = None if prefix is None else prefix.checkpoint
        if checkpoint is not None:
            self.checkpoints.move_to_end(checkpoint)
        seq.state_slots = self._take_own()
        if checkpoint is not None:
            self._restores.append((checkpoint, self._slot(seq, seq.num_cached_tokens)))

    def fork(self, seq: Sequence, sibling: Sequence) -> None:
        """Give slots to `sibling`, with equal tokens; after the step, states are copied to them."""
        if seq.seq_id in self._tips:
            self._set_tip(sibling, *self._tips[seq.seq_id])
        sibling.state_slots = self._take_own()
        length = seq.num_tokens
        self._saves.append((self._slot(seq, length), self._slot(sibling, length)))

    def plan(self, batch: Batch) -> None:
        """Plan the checkpoints of a step, and the copies for them and for new sequences.

        Checkpoints after drafts are kept if the drafts are right. If the device guesses, none is
        planned, as it is not known which tokens the step computes.
        """
        if self.layout.num_checkpoints and not batch.num_drafts:
            for seq in batch.seqs:
                self._plan(seq, len(batch.drafts.get(seq, ())))
        batch.copies = SlotCopies(self._restores, self._saves)
        self._restores, self._saves = [], []

    def _plan(self, seq: Sequence, num_drafts: int) -> None:
        start = seq.num_cached_tokens
        end = start + seq.num_scheduled_tokens
        # The last one first, if slots are short: the next turn of a conversation begins there.
        for length in reversed(self.boundaries(seq, start, end + num_drafts)):
            if self.num_planned == self.layout.num_checkpoints:
                return
            seq.checkpoints[length] = slot = self._take()
            self.num_planned += 1
            if length >= end:  # else the step leaves the states there
                self._saves.append((self._slot(seq, length), slot))

    def boundaries(self, seq: Sequence, start: int, end: int) -> list[int]:
        """The lengths above `start` and up to `end` at which `seq` gets checkpoints."""
        if not self.layout.num_checkpoints:
            return []
        interval = self.layout.interval
        lengths = [*range((start // interval + 1) * interval, end + 1, interval)]
        last = (seq.num_prompt_tokens - 1) // self.block_size * self.block_size
        if start < last <= end and last % interval:
            lengths = sorted([*lengths, last])
        return lengths

    def hashes_in_progress(self, seq: Sequence) -> list[int]:
        """The hashes of the blocks of `seq` that will end at a checkpoint."""
        size = self.block_size
        lengths = self.boundaries(seq, seq.num_cached_tokens, seq.num_tokens)
        hashes = block_hashes(seq, lengths[-1] // size, size) if lengths else []
        return [hashes[length // size - 1] for length in lengths]

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the planned checkpoints among the first `num_computed` tokens in the cache."""
        for length in sorted(length for length in seq.checkpoints if length <= num_computed):
            prefix = self._prefix(seq, length)
            slot = seq.checkpoints.pop(length)
            self.num_planned -= 1
            if prefix is None:
                self.free_slots.append(slot)
                continue
            if prefix.checkpoint is not None:
                self.free_slots.append(slot)
                self.checkpoints.move_to_end(prefix.checkpoint)
                continue
            prefix.checkpoint = slot
            prefix.num_uses += 1
            self.checkpoints[slot] = prefix

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Drop the checkpoints that were planned after the first `num_tokens`."""
        for length in [length for length in seq.checkpoints if length > num_tokens]:
            self.free_slots.append(seq.checkpoints.pop(length))
            self.num_planned -= 1

    def release(self, seq: Sequence) -> None:
        """Take back the slots of a sequence that no later step computes."""
        self.free_slots += seq.state_slots
        seq.state_slots = []

    def free(self, seq: Sequence) -> None:
        """Take back the slots and planned checkpoints of `seq`."""
        self.release(seq)
        self.rewind(seq, 0)
        self._drop_tip(seq.seq_id)

    def clear(self) -> None:
        """Remove all checkpoints. Sequences that run now enter no prefixes later."""
        while self.checkpoints:
            self.free_slots.append(self._evict())
        for seq_id in [*self._tips]:
            self._drop_tip(seq_id)

    def _begun_prefix(self, seq: Sequence) -> Prefix | None:
        """The cached prefix that an admitted sequence begins with; None if there is none."""
        if self.blocks.num_groups:
            return self._published(seq, seq.num_cached_tokens) if seq.num_cached_tokens else None
        prefix = self.blocks.prefix_of(seq, seq.num_cached_tokens)
        num_blocks = seq.num_cached_tokens // self.block_size
        self._set_tip(seq, prefix or self.prefixes.root(seq.root), num_blocks)
        return prefix

    def _prefix(self, seq: Sequence, length: int) -> Prefix | None:
        """The prefix of the first `length` tokens; None if it has left the cache."""
        if self.blocks.num_groups:
            return self._published(seq, length)
        return self._enter(seq, length)

    def _published(self, seq: Sequence, length: int) -> Prefix | None:
        """The prefix of the first `length` tokens, by the block that `seq` has published."""
        return self.blocks.published[seq.block_tables[0][length // self.block_size - 1]]

    def _enter(self, seq: Sequence, length: int) -> Prefix | None:
        """The prefix of the first `length` tokens, made if there is none. It becomes the tip."""
        if seq.seq_id not in self._tips:
            return None
        prefix, start = self._tips[seq.seq_id]
        end = length // self.block_size
        hashes = block_hashes(seq, end, self.block_size)
        for index in range(start, end):
            tokens = block_tokens(seq, index, self.block_size)
            prefix = self.prefixes.enter(prefix, hashes[index], tokens, [])
        self._set_tip(seq, prefix, end)
        return prefix

    def _set_tip(self, seq: Sequence, prefix: Prefix, num_blocks: int) -> None:
        prefix.num_uses += 1
        self._drop_tip(seq.seq_id)
        self._tips[seq.seq_id] = prefix, num_blocks

    def _drop_tip(self, seq_id: int) -> None:
        if seq_id in self._tips:
            prefix, _ = self._tips.pop(seq_id)
            self.prefixes.give_up(prefix)

    def _slot(self, seq: Sequence, length: int) -> int:
        """The slot with the states after the first `length` tokens."""
        return seq.state_slots[(length - 1) % len(seq.state_slots)]

    def _take_own(self) -> list[int]:
        return [self._take() for _ in range(self.layout.slots_per_sequence)]

    def _take(self) -> int:
        return self.free_slots.pop() if self.free_slots else self._evict()

    def _evict(self) -> int:
        """Remove the least recently used checkpoint; returns its slot."""
        slot, prefix = self.checkpoints.popitem(last=False)
        prefix.checkpoint = None
        self.prefixes.give_up(prefix)
        return slot
