"""StateSlots: which slots have the states of running sequences, and which have checkpoints.

It knows slot numbers and prefixes, and no tensors.
"""

from collections import deque
from typing import NamedTuple

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.branches import Branches
from nanovllm.engine.cache.checkpoints import Checkpoints
from nanovllm.engine.cache.prefixes import Prefix, block_hashes
from nanovllm.engine.cache.state_prefixes import PrefixesAlone, PrefixesOfBlocks
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


class Last(NamedTuple):
    """The last checkpoint of a running sequence: the one it began with, or has made."""

    slot: int
    prefix: Prefix  # while `slot` has this one
    is_rolling: bool


class StateSlots:
    """The slots of a model's states. A slot has the states of all layers after one token.

    The state after the token at position p is in slot p % `slots_per_sequence` of the sequence's
    own slots. So a draft's state does not overwrite the state of the token before the drafts, and
    the state after a wrong draft is overwritten by that of the right token. The first slot stays
    zeroed, for sequences that begin; states that are not kept are written to the last slot.

    Other slots have checkpoints: copies of the states after a prefix, which restore a sequence that
    begins with this prefix. `boundaries` says where they are made. The last one is *rolling*: the
    next one replaces it. If no slot is free, a checkpoint is dropped, in the order of
    `Checkpoints`. So a running sequence always gets its own slots.

    `prefixes` finds and enters the prefixes of checkpoints.
    """

    def __init__(self, layout: StateLayout, num_running: int, blocks: BlockManager) -> None:
        self.layout = layout
        self.block_size = blocks.block_size
        self.prefixes = PrefixesOfBlocks(blocks) if blocks.num_groups else PrefixesAlone(blocks)
        self.free_slots = [*range(1, layout.num_slots(num_running) - 1)][::-1]
        self.num_slots = len(self.free_slots)
        self.checkpoints = Checkpoints()
        self.branches = Branches(blocks)
        self.num_planned = 0  # checkpoints of steps that may not be computed yet
        # Planned after drafts of the device, by `seq_id`: steps, lengths and slots.
        self.guessed: dict[int, list[tuple[Batch, int, int]]] = {}
        self.last: dict[int, Last] = {}  # by `seq_id`
        self._restores: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []

    def counts(self) -> tuple[int, int, int]:
        """How many slots running sequences have, how many have checkpoints, and how many exist."""
        num_free = len(self.free_slots) + len(self.checkpoints) + self.num_planned
        return self.num_slots - num_free, len(self.checkpoints), self.num_slots

    def begin(self, seq: Sequence, waiting: deque[Sequence] | None = None) -> None:
        """Give `seq` slots; before the step, the states of its cached prefix are copied to them.

        `waiting` has the sequences that begin later, with which it may share its prompt.
        """
        prefix = self.prefixes.begin(seq)
        checkpoint = None if prefix is None else prefix.checkpoint
        if prefix is not None and checkpoint is not None:
            self.checkpoints.begin(checkpoint)
            self.last[seq.seq_id] = Last(checkpoint, prefix, False)
        seq.state_slots = self._take_own()
        if checkpoint is not None:
            self._restores.append((checkpoint, self._slot(seq, seq.num_cached_tokens)))
        if self.layout.num_checkpoints:
            self.branches.find(seq, waiting)

    def fork(self, seq: Sequence, sibling: Sequence) -> None:
        """Give slots to `sibling`, with equal tokens; after the step, states are copied to them."""
        self.prefixes.fork(seq, sibling)
        sibling.state_slots = self._take_own()
        length = seq.num_tokens
        self._saves.append((self._slot(seq, length), self._slot(sibling, length)))

    def plan(self, batch: Batch) -> None:
        """Plan the checkpoints of a step, and the copies for them and for new sequences.

        Checkpoints after drafts are kept if the drafts are right.
        """
        if self.layout.num_checkpoints:
            if batch.num_drafts:
                self._plan_guesses(batch)
            else:
                self._plan_all(batch)
        batch.copies = SlotCopies(self._restores, self._saves)
        self._restores, self._saves = [], []

    def _plan_all(self, batch: Batch) -> None:
        """Plan those of a step of known tokens and drafts. Most sequences end no block."""
        size, drafts, seqs = self.block_size, batch.drafts, batch.seqs
        if not (batch.is_prefill or drafts):
            seqs = [seq for seq in seqs if (seq.num_cached_tokens + 1) % size == 0]
        for seq in seqs:
            start = seq.num_cached_tokens
            end = start + seq.num_scheduled_tokens
            num_drafts = len(drafts.get(seq, ())) if drafts else 0
            if (end + num_drafts) // size > start // size:
                self._plan(seq, start, end, num_drafts)

    def _plan(self, seq: Sequence, start: int, end: int, num_drafts: int) -> None:
        lengths = self.boundaries(seq, start, end)
        if num_drafts:
            lengths |= self.boundaries(seq, start, end + num_drafts)
        # The last one first, if slots are short: the next turn of a conversation begins there.
        for length in sorted(lengths, reverse=True):
            if self.num_planned == self.layout.num_checkpoints:
                return
            seq.checkpoints[length] = slot = self._take(seq)
            self.num_planned += 1
            if length >= end:  # else the step leaves the states there
                self._saves.append((self._slot(seq, length), slot))

    def _plan_guesses(self, batch: Batch) -> None:
        """Plan those of a step that guesses: at the first block's end that it may compute.

        It is not known where such a step starts if the one before it guesses and is in flight. So
        both may copy the states of one length, to two slots. `accept` chooses.
        """
        size, number = self.block_size, batch.num_drafts
        for seq in batch.seqs:
            start = seq.num_cached_tokens
            length = (start // size + 1) * size
            end = start + 1 + seq.num_possible_tokens + number
            if length > end or length > seq.room or length >= seq.max_num_tokens:
                continue
            if self.num_planned < self.layout.num_checkpoints:
                slot = self._take(seq)
                self.num_planned += 1
                self._saves.append((self._slot(seq, length), slot))
                self.guessed.setdefault(seq.seq_id, []).append((batch, length, slot))

    def accept(self, seq: Sequence, batch: Batch, start: int, end: int) -> None:
        """Enter what was planned for a step that guesses, if it computed that length of `seq`.

        Of the step's tokens those from `start` to `end` count. The slot with the states after an
        earlier token may have been overwritten.
        """
        planned = self.guessed.get(seq.seq_id, ())
        for entry in [entry for entry in planned if entry[0] is batch]:
            self.guessed[seq.seq_id].remove(entry)
            _, length, slot = entry
            self.num_planned -= 1
            if start < length <= end:
                self._enter_checkpoint(seq, length, slot)
            else:
                self.free_slots.append(slot)

    def boundaries(self, seq: Sequence, start: int, end: int) -> set[int]:
        """The lengths above `start` and up to `end` at which `seq` gets checkpoints.

        At intervals, at the end of the prompt's last full block, where others share its tokens, and
        at the last full block, where its next turn begins or where it restarts.
        """
        if not self.layout.num_checkpoints:
            return set()
        interval, size = self.layout.interval, self.block_size
        lengths = {*range((start // interval + 1) * interval, end + 1, interval)}
        others = [end // size * size, self._prompt_end(seq)]
        others += self.branches.lengths.get(seq.seq_id, ())
        return lengths.union(length for length in others if start < length <= end)

    def _prompt_end(self, seq: Sequence) -> int:
        """The end of the last full block that an equal prompt need not compute."""
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def hashes_in_progress(self, seq: Sequence) -> list[int]:
        """The hashes of the blocks of `seq` that will end at a checkpoint."""
        size = self.block_size
        lengths = sorted(self.boundaries(seq, seq.num_cached_tokens, seq.num_tokens))
        hashes = block_hashes(seq, lengths[-1] // size, size) if lengths else []
        return [hashes[length // size - 1] for length in lengths]

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the planned checkpoints among the first `num_computed` tokens in the cache."""
        for length in sorted(length for length in seq.checkpoints if length <= num_computed):
            self.num_planned -= 1
            self._enter_checkpoint(seq, length, seq.checkpoints.pop(length))

    def _enter_checkpoint(self, seq: Sequence, length: int, slot: int) -> None:
        """Enter a checkpoint of `seq`. It replaces a rolling one, and supersedes others."""
        prefix = self.prefixes.enter(seq, length)
        if prefix is None:
            self.free_slots.append(slot)
            return
        of_prompt = length == self._prompt_end(seq)
        may_pass = self.branches.lengths.get(seq.seq_id, {}).get(length, True)
        is_passing = may_pass and length % self.layout.interval > 0
        is_new = prefix.checkpoint is None
        if prefix.checkpoint is None:
            self.checkpoints.enter(slot, prefix, is_passing)
        else:
            self.free_slots.append(slot)
            slot = prefix.checkpoint
            self.checkpoints.enter_again(slot, is_passing)
        last = self.last.get(seq.seq_id)
        if last is None or last.slot != slot:
            self._leave_last(seq)
        self.last[seq.seq_id] = Last(slot, prefix, is_new and is_passing and not of_prompt)

    def _leave_last(self, seq: Sequence) -> None:
        """Drop the last checkpoint of `seq` if it is rolling; else it may be superseded."""
        last = self.last.pop(seq.seq_id, None)
        if last is None or self.checkpoints.get(last.slot) is not last.prefix:
            return
        if last.is_rolling and self.checkpoints.is_unused(last.slot):
            self.free_slots.append(self._drop(last.slot))
        else:
            self.checkpoints.supersede(last.slot)

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
        for _, _, slot in self.guessed.pop(seq.seq_id, ()):
            self.free_slots.append(slot)
            self.num_planned -= 1
        self.last.pop(seq.seq_id, None)
        self.branches.drop(seq)
        self.prefixes.drop(seq.seq_id)

    def clear(self) -> None:
        """Remove all checkpoints. Sequences that run now enter no prefixes later."""
        while self.checkpoints:
            self.free_slots.append(self._drop_next())
        self.branches.clear()
        self.prefixes.clear()

    def _slot(self, seq: Sequence, length: int) -> int:
        """The slot with the states after the first `length` tokens."""
        return seq.state_slots[(length - 1) % len(seq.state_slots)]

    def _take_own(self) -> list[int]:
        return [self._take() for _ in range(self.layout.slots_per_sequence)]

    def _take(self, seq: Sequence | None = None) -> int:
        """A slot. If none is free, that of the rolling checkpoint of `seq`, else the next one."""
        if not self.free_slots and seq is not None:
            last = self.last.get(seq.seq_id)
            if last is not None and last.is_rolling:
                self._leave_last(seq)
        return self.free_slots.pop() if self.free_slots else self._drop_next()

    def _drop_next(self) -> int:
        return self._drop(self.checkpoints.next_to_drop())

    def _drop(self, slot: int) -> int:
        """Remove a checkpoint; returns its slot."""
        self.prefixes.give_up(self.checkpoints.remove(slot))
        return slot
