"""Ledger: the host's view of the device table.

It knows which sequence owns each row and which values the devices already have, and so which
changes a step has to send. Only rank 0 has one.
"""

import operator
import weakref
from collections.abc import Container, Iterator

import numpy as np

from nanovllm.drafting.drafted_blocks import DraftedBlocks, Lack
from nanovllm.engine.run.device_table import NO_ADAPTER, TableChanges, TableLayout
from nanovllm.engine.run.draw_inputs import temperature_of
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import PENDING, Sequence, SequenceStatus
from nanovllm.kernels.plain.read_table import CHANCE_BITS

UNKNOWN = -2  # in arrays: differs from every length and every row


class Ledger:
    """Rows by sequence, and the values that the devices have.

    It relies on how sequences keep block tables: lists that grow, in a list that is a new one when
    a table is replaced or the sequence starts over. A token in flight stays in its row until a
    later step or the host has read it. So only running sequences need rows, and those that end in
    flight do not.

    After a step with drafts only the device knows a row's last token and length. Such a row is
    ahead, and nothing of that is sent until a step without drafts: by then the host knows them.

    The guesser has seen all tokens of a row that is ahead. Of another it may lack some: these are
    sent to the row's history, or a draft model computes them before the next step with drafts.
    """

    def __init__(self, layout: TableLayout, drafts_longest: int | None = None) -> None:
        """`drafts_longest` is the most tokens of a sequence that a draft model computes."""
        self.layout, self._drafts_longest = layout, drafts_longest
        self.reset()

    def reset(self) -> None:
        """Trust nothing: all sequences start over, and get rows that are written again."""
        num_rows = self.layout.num_rows
        self._offsets: list[int] = []
        self._words: list[int] = []
        self._history: list[tuple[Array, Array]] = []  # offsets and words, which are many
        self._rows: dict[int, int] = {}  # by seq_id
        self._owners: dict[int, weakref.ref[Sequence]] = {}  # by row
        self._free = list(range(num_rows - 1))[::-1]
        groups = range(self.layout.num_tables)
        self._tables: list[list[list[int]]] = [[[]] * num_rows for _ in groups]
        self._num_blocks = [np.zeros(num_rows, np.int64) for _ in groups]
        self._lengths = np.full(num_rows, UNKNOWN)
        self._num_tokens = np.full(num_rows, UNKNOWN)  # counting the row's last token
        self._is_ahead = np.zeros(num_rows, bool)
        self._num_seen = np.zeros(num_rows, np.int64)  # by the guesser: first tokens, at least
        longest = self._drafts_longest
        self._drafted = DraftedBlocks(self.layout.block_size, longest) if longest else None
        self._batch: Array = np.full(num_rows, UNKNOWN)
        self._batch_rows: Array | None = None  # the rows of which it was made
        self._slots = np.full(num_rows, NO_ADAPTER)  # of adapters
        self._last_tables: list[list[list[int]]] = []  # by sequence, and by group
        self._last_of_groups: list[list[list[int]]] = []
        self._last_rows: Array = np.zeros(0, np.int64)

    def decode(
        self, seqs: list[Sequence], num_drafts: int = 0
    ) -> tuple[int, TableChanges, list[Lack]]:
        """The width of the block tables of a decode step, the changes to send, and what lacks.

        The rows hold the sequences' last tokens, except for a prompt that was cached up to its last
        token. In a step with `num_drafts` the device guesses so many for each.
        """
        layout = self.layout
        rows, width = self._change_blocks(seqs)
        lengths = np.fromiter((seq.num_cached_tokens for seq in seqs), np.int64, len(seqs))
        stale = self._lengths[rows] != lengths
        unknown = self._num_tokens[rows] != lengths + 1
        if layout.most_drafts:
            is_behind = ~self._is_ahead[rows]
            stale &= is_behind
            unknown &= is_behind
            if not num_drafts and not is_behind.all():
                self._fall_behind(rows, lengths)
            self._is_ahead[rows] = num_drafts > 0
        changed = np.flatnonzero(stale)
        self._change_each(layout.lengths + rows[changed], lengths[changed])
        for index in np.flatnonzero(unknown).tolist():
            token_id = seqs[index].token_ids[-1]
            assert token_id != PENDING
            self._change(layout.tokens + 2 * int(rows[index]), [token_id, 0])
        self._lengths[rows] = lengths + 1
        self._num_tokens[rows] = lengths + 2
        lacks: list[Lack] = []
        if num_drafts:
            for index in np.flatnonzero(is_behind).tolist():
                lacks += self._let_see(seqs[index], int(rows[index]))
        if rows is not self._batch_rows:
            self._change_batch(rows)
        return width, self._take_changes(), lacks

    def prefill(
        self,
        seqs: list[Sequence],
        sampling_seqs: list[Sequence],
        drafted: Container[Sequence] = (),
    ) -> tuple[Array, Array, int, TableChanges]:
        """The rows of a prefill's sequences, those of its samples, the width, the changes.

        Only the host knows which sample of a `drafted` sequence will be its last token: they go to
        the unused row, and the next decode step writes the token.
        """
        rows, width = self._change_blocks(seqs)
        if self._is_ahead[rows].any():
            self._fall_behind(rows, np.array([seq.num_cached_tokens for seq in seqs]))
            self._resend(rows[self._is_ahead[rows]])
        sample_table_rows = self._rows_of(sampling_seqs)
        if sampling_seqs:
            self._num_tokens[sample_table_rows] = [len(seq.token_ids) + 1 for seq in sampling_seqs]
        if drafted:
            lost = np.array([seq in drafted for seq in sampling_seqs])
            self._num_tokens[sample_table_rows[lost]] = UNKNOWN
            sample_table_rows[lost] = self.layout.unused_row
        return rows, sample_table_rows, width, self._take_changes()

    @property
    def adapts(self) -> bool:
        """Whether a sequence of the last step has an adapter."""
        return self.layout.has_adapters and bool((self._slots[self._last_rows] >= 0).any())

    def set_chance(self, chance: float) -> None:
        """Let the device accept drafts by chance, right or wrong: for measurements."""
        self._change(self.layout.chance, [int(chance * 2**CHANCE_BITS)])

    def _change_blocks(self, seqs: list[Sequence]) -> tuple[Array, int]:
        """Add the blocks that are new. Returns the rows, and the length of the longest table."""
        tables, last = [seq.block_tables for seq in seqs], self._last_tables
        if len(tables) != len(last) or not all(map(operator.is_, tables, last)):
            self._last_rows = self._rows_of(seqs)
            self._last_of_groups = [*self._of_groups(seqs)]
            self._last_tables = tables
        rows, layout = self._last_rows, self.layout
        width = 0 if layout.parts else layout.max_blocks
        changed: set[int] = set()  # of these sequences, those with new blocks
        for group, of_group in enumerate(self._last_of_groups):
            known = self._num_blocks[group]
            sizes = np.fromiter(map(len, of_group), np.int64, len(of_group))
            new = np.flatnonzero(known[rows] != sizes).tolist()
            if new:
                for index in new:
                    self._append(seqs[index], int(rows[index]), group, of_group[index])
                known[rows] = sizes
                changed.update(new)
            if group < len(layout.parts):
                width = max(width, int(sizes.max()))
        if layout.most_drafts:
            for index in sorted(changed):
                limit = min(seqs[index].room, seqs[index].max_num_tokens - 1)
                self._change(layout.limits + int(rows[index]), [limit])
        return rows, width

    def _of_groups(self, seqs: list[Sequence]) -> Iterator[list[list[int]]]:
        """For each cache group the sequences' tables, and their slots for states after those.

        A table that is not the row's last one is sent as a whole.
        """
        for group in range(self.layout.num_tables):
            if group < len(self.layout.parts):
                tables = [seq.block_tables[group] for seq in seqs]
            else:
                tables = [seq.state_slots for seq in seqs]
            for row, seq, table in zip(self._last_rows.tolist(), seqs, tables, strict=True):
                if self._tables[group][row] is not table:
                    self._change_table(seq, row, group, table)
            yield tables

    def _append(self, seq: Sequence, row: int, group: int, table: list[int]) -> None:
        """Send the blocks of a table that are new, or the slots of states after all groups'."""
        start = int(self._num_blocks[group][row])
        blocks = table[start:]
        if group == len(self.layout.parts):
            self._change(self.layout.state_slots_of(row) + start, blocks)
            return
        if (parts := self.layout.parts[group]) > 1:
            blocks = [block * parts for block in blocks]
        self._change(self.layout.block_table(group, row) + start, blocks)
        if self._drafted and not group and self._is_ahead[row]:
            self._drafted.take(seq, start)

    def _change_batch(self, rows: Array) -> None:
        batch = np.full(self.layout.num_rows, self.layout.unused_row)
        batch[: len(rows)] = rows
        stale = np.flatnonzero(batch != self._batch)
        self._change_each(self.layout.batch + stale, batch[stale])
        self._batch, self._batch_rows = batch, rows

    def _change_table(self, seq: Sequence, row: int, group: int, table: list[int]) -> None:
        """Send a new table: of a sequence that starts over, or has given back some blocks."""
        self._tables[group][row] = table
        self._num_blocks[group][row] = 0
        if self.layout.has_adapters:
            self._slots[row] = slot = adapter_slot(seq)
            self._change(self.layout.adapters + row, [slot])
        if self._is_ahead[row]:
            self._fall_behind(np.array([row]), np.array([seq.num_cached_tokens]))
            self._resend(row)

    def _fall_behind(self, rows: Array, lengths: Array) -> None:
        """Note what the guesser has seen of rows that are ahead, whose lengths are known by now.

        All tokens but the last one when the last step began, which added 1 + `most_drafts` at most.
        """
        is_ahead = self._is_ahead[rows]
        seen = lengths[is_ahead] - 1 - self.layout.most_drafts
        self._num_seen[rows[is_ahead]] = np.maximum(self._num_seen[rows[is_ahead]], seen)

    def _let_see(self, seq: Sequence, row: int) -> Iterator[Lack]:
        """Let the guesser see the tokens of a row that is behind, by a history or a draft model.

        All its tokens are known but the last one, which is in its place.
        """
        self._change(self.layout.counts + row, [1])
        start, end = int(self._num_seen[row]), len(seq.token_ids) - 1
        if self.layout.longest:
            first = self.layout.history + row * self.layout.longest
            tokens = np.array(seq.token_ids[start:end], np.int32)
            self._history.append((np.arange(first + start, first + end), tokens))
        if self._drafted:
            end = min(end, self._drafted.longest)
            start = self._drafted.complete(seq, start, end)
            if start < end:
                yield Lack(seq, row, start, end)
        self._num_seen[row] = end

    def _resend(self, rows: Array | int) -> None:
        """Let the next decode step write the lengths and the last tokens of rows that are ahead."""
        self._lengths[rows] = self._num_tokens[rows] = UNKNOWN
        self._is_ahead[rows] = False

    def _rows_of(self, seqs: list[Sequence]) -> Array:
        rows = self._rows
        for seq in seqs:
            if seq.seq_id not in rows:
                rows[seq.seq_id] = self._take_row(seq)
        return np.array([rows[seq.seq_id] for seq in seqs], np.int64)

    def _take_row(self, seq: Sequence) -> int:
        """A row for a sequence without one; if none is free, first free those not needed."""
        if not self._free:
            for seq_id, row in list(self._rows.items()):
                owner = self._owners[row]()
                if owner is None or not _needs_row(owner):
                    del self._rows[seq_id]
                    self._free.append(row)
        row = self._free.pop()
        self._owners[row] = weakref.ref(seq)
        if self._is_ahead[row]:
            self._resend(row)
        self._num_tokens[row] = UNKNOWN
        self._num_seen[row] = 0
        self._change(self.layout.seeds + 2 * row, _words(seq.seed & (2**64 - 1), np.uint64))
        self._change(self.layout.temperatures + row, _words(temperature_of(seq), np.float32))
        return row

    def _change(self, offset: int, words: list[int]) -> None:
        """Write words from an offset on."""
        self._offsets += range(offset, offset + len(words))
        self._words += words

    def _change_each(self, offsets: Array, words: Array) -> None:
        self._offsets += offsets.tolist()
        self._words += words.tolist()

    def _take_changes(self) -> TableChanges:
        changes = TableChanges(np.array(self._offsets, np.int64), np.array(self._words, np.int32))
        if self._history:
            columns = zip(changes, *self._history, strict=True)
            changes = TableChanges(*map(np.concatenate, columns))
        self._offsets.clear()
        self._words.clear()
        self._history.clear()
        return changes


def _needs_row(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.RUNNING and not seq.ends_in_flight


def adapter_slot(seq: Sequence) -> int:
    """The slot of a running sequence's adapter."""
    return NO_ADAPTER if seq.adapter is None else int(seq.adapter.slot)


def _words(value: float, dtype: type[np.number]) -> list[int]:
    """A number as 32-bit words."""
    words: list[int] = np.array([value], dtype).view(np.int32).tolist()
    return words
