"""Ledger: the host's view of the device table.

It knows which sequence owns each row and which values the devices already have, and so which
changes a step has to send. Only rank 0 has one.
"""

import operator
import weakref
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.run.device_table import UNMARKED, TableChanges, TableLayout
from nanovllm.engine.run.draw_inputs import temperature_of
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import PENDING, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.run.rows_ahead import RowsAhead

UNKNOWN = -2  # in arrays; differs from every length and every row


class Ledger:
    """Rows by sequence, and the values that the devices have.

    It relies on how sequences keep block tables: a table is a list that only grows, and a new list
    when the table is replaced or the sequence starts over. A token in flight stays in its row until
    a later step or the host has read it. So only running sequences need rows, and those that end
    in flight do not.

    With drafts some rows are `ahead`. Their last tokens and lengths are not sent until a step
    without drafts, when the host knows them.
    """

    def __init__(
        self,
        layout: TableLayout,
        ahead: "RowsAhead | None" = None,
        mark_of: Callable[[Sequence], int] | None = None,
    ) -> None:
        self.layout, self.ahead, self._mark_of = layout, ahead, mark_of
        self.reset()

    def reset(self) -> None:
        """Forget all rows: all sequences start over, and their rows are written again."""
        num_rows = self.layout.num_rows
        if self.ahead is not None:
            self.ahead.reset()
        self._offsets: list[int] = []
        self._words: list[int] = []
        self._rows: dict[int, int] = {}  # by seq_id
        self._owners: dict[int, weakref.ref[Sequence]] = {}  # by row
        self._free = list(range(num_rows - 1))[::-1]
        groups = range(self.layout.num_tables)
        self._tables: list[list[list[int]]] = [[[]] * num_rows for _ in groups]
        self._num_blocks = [np.zeros(num_rows, np.int64) for _ in groups]
        self._lengths = np.full(num_rows, UNKNOWN)
        self._num_tokens = np.full(num_rows, UNKNOWN)  # counting the row's last token
        self._batch: Array = np.full(num_rows, UNKNOWN)
        self._batch_rows: Array | None = None  # the rows from which `_batch` was made
        self._marks = np.full(num_rows, UNMARKED)
        self._last_tables: list[list[list[int]]] = []  # by sequence, and by group
        self._last_of_groups: list[list[list[int]]] = []
        self._last_rows: Array = np.zeros(0, np.int64)

    def decode(self, seqs: list[Sequence], num_drafts: int = 0) -> tuple[int, TableChanges]:
        """The width of the block tables of a decode step, and the changes to send.

        The rows have the sequences' last tokens already, except for a prompt that was cached up to
        its last token. The device guesses up to `num_drafts` tokens for each sequence.
        """
        layout = self.layout
        rows, width = self._change_blocks(seqs)
        lengths = np.fromiter((seq.num_cached_tokens for seq in seqs), np.int64, len(seqs))
        stale = self._lengths[rows] != lengths
        unknown = self._num_tokens[rows] != lengths + 1
        if self.ahead is not None:
            is_behind = self.ahead.decode(seqs, rows, lengths, num_drafts)
            stale &= is_behind
            unknown &= is_behind
        changed = np.flatnonzero(stale)
        self._change_each(layout.lengths + rows[changed], lengths[changed])
        for index in np.flatnonzero(unknown).tolist():
            token_id = seqs[index].token_ids[-1]
            assert token_id != PENDING
            self._change(layout.tokens + 2 * int(rows[index]), [token_id, 0])
        self._lengths[rows] = lengths + 1
        self._num_tokens[rows] = lengths + 2
        if rows is not self._batch_rows:
            self._change_batch(rows)
        return width, self._take_changes()

    def prefill(
        self,
        seqs: list[Sequence],
        sampling_seqs: list[Sequence],
        drafted: Container[Sequence] = (),
    ) -> tuple[Array, Array, int, TableChanges]:
        """The rows of a prefill's sequences and of its samples, the width, and the changes.

        Only the host can find out which sample of a `drafted` sequence is its last token: such
        samples go to the unused row, and the next decode step writes the token.
        """
        rows, width = self._change_blocks(seqs)
        self._stop(seqs, rows)
        sample_table_rows = self._rows_of(sampling_seqs)
        if sampling_seqs:
            self._num_tokens[sample_table_rows] = [len(seq.token_ids) + 1 for seq in sampling_seqs]
        if drafted:
            lost = np.array([seq in drafted for seq in sampling_seqs])
            self._num_tokens[sample_table_rows[lost]] = UNKNOWN
            sample_table_rows[lost] = self.layout.unused_row
        return rows, sample_table_rows, width, self._take_changes()

    @property
    def is_marked(self) -> bool:
        """Whether a sequence of the last step has a mark."""
        return self._mark_of is not None and bool((self._marks[self._last_rows] >= 0).any())

    def marks_of(self, seqs: list[Sequence]) -> Array:
        """The marks of sequences."""
        assert self._mark_of is not None
        return np.fromiter(map(self._mark_of, seqs), np.int32, len(seqs))

    def _change_blocks(self, seqs: list[Sequence]) -> tuple[Array, int]:
        """Add new blocks to the changes. Returns the rows, and the length of the longest table."""
        tables, last = [seq.block_tables for seq in seqs], self._last_tables
        if len(tables) != len(last) or not all(map(operator.is_, tables, last)):
            self._last_rows = self._rows_of(seqs)
            self._last_of_groups = [*self._of_groups(seqs)]
            self._last_tables = tables
        rows, layout = self._last_rows, self.layout
        width = 0 if layout.block_parts else layout.max_blocks
        changed: set[int] = set()  # indices of sequences with new blocks
        for group, of_group in enumerate(self._last_of_groups):
            known = self._num_blocks[group]
            sizes = np.fromiter(map(len, of_group), np.int64, len(of_group))
            new = np.flatnonzero(known[rows] != sizes).tolist()
            if new:
                for index in new:
                    self._append(seqs[index], int(rows[index]), group, of_group[index])
                known[rows] = sizes
                changed.update(new)
            if group < len(layout.block_parts):
                width = max(width, int(sizes.max()))
        if self.ahead is not None:
            self.ahead.limit(seqs, rows, sorted(changed))
        return rows, width

    def _of_groups(self, seqs: list[Sequence]) -> Iterator[list[list[int]]]:
        """The sequences' tables in each cache group, then their slots of states.

        A table that is not the list which the row had last is sent as a whole.
        """
        for group in range(self.layout.num_tables):
            if group < len(self.layout.block_parts):
                tables = [seq.block_tables[group] for seq in seqs]
            else:
                tables = [seq.state_slots for seq in seqs]
            for row, seq, table in zip(self._last_rows.tolist(), seqs, tables, strict=True):
                if self._tables[group][row] is not table:
                    self._change_table(seq, row, group, table)
            yield tables

    def _append(self, seq: Sequence, row: int, group: int, table: list[int]) -> None:
        """Send the new blocks of a table, or new slots of states."""
        start = int(self._num_blocks[group][row])
        blocks = table[start:]
        if group == len(self.layout.block_parts):
            self._change(self.layout.slots_of(row) + start, blocks)
            return
        if (parts := self.layout.block_parts[group]) > 1:
            blocks = [block * parts for block in blocks]
        self._change(self.layout.block_table(group, row) + start, blocks)
        if self.ahead is not None and not group:
            self.ahead.extend(seq, row, start)

    def _change_batch(self, rows: Array) -> None:
        batch = np.full(self.layout.num_rows, self.layout.unused_row)
        batch[: len(rows)] = rows
        stale = np.flatnonzero(batch != self._batch)
        self._change_each(self.layout.batch + stale, batch[stale])
        self._batch, self._batch_rows = batch, rows

    def _change_table(self, seq: Sequence, row: int, group: int, table: list[int]) -> None:
        """Send a whole table, as the sequence has started over or given back some blocks."""
        self._tables[group][row] = table
        self._num_blocks[group][row] = 0
        if self._mark_of is not None:
            self._marks[row] = mark = self._mark_of(seq)
            self._change(self.layout.marks + row, [mark])
        self._stop([seq], np.array([row]))

    def _stop(self, seqs: list[Sequence], rows: Array) -> None:
        """Let the next decode step write the lengths and the last tokens of rows that are ahead."""
        if self.ahead is not None:
            stopped = self.ahead.stop(seqs, rows)
            self._lengths[stopped] = self._num_tokens[stopped] = UNKNOWN

    def _rows_of(self, seqs: list[Sequence]) -> Array:
        rows = self._rows
        for seq in seqs:
            if seq.seq_id not in rows:
                rows[seq.seq_id] = self._take_row(seq)
        return np.array([rows[seq.seq_id] for seq in seqs], np.int64)

    def _take_row(self, seq: Sequence) -> int:
        """Give a row to a sequence. If no row is free, first free the rows that are not needed."""
        if not self._free:
            for seq_id, row in list(self._rows.items()):
                owner = self._owners[row]()
                if owner is None or not _needs_row(owner):
                    del self._rows[seq_id]
                    self._free.append(row)
        row = self._free.pop()
        self._owners[row] = weakref.ref(seq)
        if self.ahead is not None and self.ahead.give(row):
            self._lengths[row] = UNKNOWN
        self._num_tokens[row] = UNKNOWN
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
        self._offsets.clear()
        self._words.clear()
        return changes if self.ahead is None else self.ahead.added_to(changes)


def _needs_row(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.RUNNING and not seq.ends_in_flight


def _words(value: float, dtype: type[np.number]) -> list[int]:
    """A number as 32-bit words."""
    words: list[int] = np.array([value], dtype).view(np.int32).tolist()
    return words
