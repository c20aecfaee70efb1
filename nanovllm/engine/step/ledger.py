"""Ledger: the host's view of the device table.

It knows which sequence owns each row and which values the devices already have, and so which
changes a step has to send. Only rank 0 has one.
"""

import operator
import weakref
from collections.abc import Container, Mapping

import numpy as np

from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus
from nanovllm.engine.step.device_table import TableChanges, TableLayout
from nanovllm.engine.step.draw_inputs import temperature_of
from nanovllm.engine.step.transfer import Array
from nanovllm.kernels.plain.accept import CHANCE_BITS
from nanovllm.kernels.plain.read_table import NO_DRAFT

UNKNOWN = -2  # in arrays: differs from every length and every row
NONE_GIVEN: Mapping[Sequence, list[int]] = {}


class Ledger:
    """Rows by sequence, and the values that the devices have.

    It relies on how sequences keep their block tables: a list that grows, and a new list when they
    start over. A token in flight stays in its sequence's row until the host has read it: sequences
    with a token in flight are running or finished, so only running sequences need rows.

    After a step with drafts only the device knows a row's last token and length. Such a row is
    ahead, and nothing of that is sent until a step without drafts: by then the host knows them.
    """

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
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
        self._tables: list[list[int]] = [[]] * num_rows
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._lengths = np.full(num_rows, UNKNOWN)
        self._num_tokens = np.full(num_rows, UNKNOWN)  # counting the row's last token
        self._is_ahead = np.zeros(num_rows, bool)
        self._is_given = np.full(num_rows, UNKNOWN)
        self._num_sent = np.zeros(num_rows, np.int64)  # tokens of the history, at least
        self._batch: Array = np.full(num_rows, UNKNOWN)
        self._batch_rows: Array | None = None  # the rows of which it was made
        self._last_tables: list[list[int]] = []
        self._last_rows: Array = np.zeros(0, np.int64)

    def decode(
        self,
        seqs: list[Sequence],
        num_drafts: int = 0,
        given: Mapping[Sequence, list[int]] = NONE_GIVEN,
    ) -> tuple[int, TableChanges]:
        """The width of the block tables of a decode step, and the changes to send.

        The rows hold the sequences' last tokens, except for a prompt that was cached up to its last
        token. In a step with `num_drafts`, those that are not `given` are guessed by the device.
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
            self._is_ahead[rows] = num_drafts > 0
        changed = np.flatnonzero(stale)
        self._change_each(layout.lengths + rows[changed], lengths[changed])
        for index in np.flatnonzero(unknown).tolist():
            token_id = seqs[index].token_ids[-1]
            assert token_id != PENDING
            self._change(layout.tokens + 2 * int(rows[index]), [token_id, 0])
        self._lengths[rows] = lengths + 1
        self._num_tokens[rows] = lengths + 2
        if num_drafts:
            self._change_drafts(seqs, rows, given)
            self._send_history(
                [(seqs[i], int(rows[i])) for i in np.flatnonzero(is_behind).tolist()]
            )
        if rows is not self._batch_rows:
            self._change_batch(rows)
        return width, self._take_changes()

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
        self._resend(rows[self._is_ahead[rows]])
        sample_table_rows = self._rows_of(sampling_seqs)
        if sampling_seqs:
            self._num_tokens[sample_table_rows] = [len(seq.token_ids) + 1 for seq in sampling_seqs]
        if drafted:
            lost = np.array([seq in drafted for seq in sampling_seqs])
            self._num_tokens[sample_table_rows[lost]] = UNKNOWN
            sample_table_rows[lost] = self.layout.unused_row
        return rows, sample_table_rows, width, self._take_changes()

    def rewrite_tokens(self, seqs: list[Sequence]) -> None:
        """Let the next decode step write the last tokens of `seqs`: the rows may hold others."""
        self._num_tokens[self._rows_of(seqs)] = UNKNOWN

    def set_chance(self, chance: float) -> None:
        """Let the device accept drafts by chance, right or wrong: for measurements."""
        self._change(self.layout.chance, [int(chance * 2**CHANCE_BITS)])

    def _change_blocks(self, seqs: list[Sequence]) -> tuple[Array, int]:
        """Add the blocks that are new. Returns the rows, and the length of the longest table."""
        tables = [seq.block_table for seq in seqs]
        sizes = np.fromiter(map(len, tables), np.int64, len(tables))
        last = self._last_tables
        if len(tables) != len(last) or not all(map(operator.is_, tables, last)):
            self._last_rows = self._rows_of(seqs)
            for row, table in zip(self._last_rows.tolist(), tables, strict=True):
                if self._tables[row] is not table:
                    self._tables[row] = table
                    self._num_blocks[row] = 0
                    if self._is_ahead[row]:  # of a sequence that starts over
                        self._resend(row)
            self._last_tables = tables
        rows = self._last_rows
        known = self._num_blocks[rows]
        for index in np.flatnonzero(known != sizes).tolist():
            start = int(known[index])
            first = self.layout.block_tables + int(rows[index]) * self.layout.max_blocks
            self._change(first + start, tables[index][start:])
            if self.layout.most_drafts:
                limit = min(
                    len(tables[index]) * self.layout.block_size, seqs[index].max_num_tokens - 1
                )
                self._change(self.layout.limits + int(rows[index]), [limit])
        self._num_blocks[rows] = sizes
        return rows, int(sizes.max())

    def _change_batch(self, rows: Array) -> None:
        batch = np.full(self.layout.num_rows, self.layout.unused_row)
        batch[: len(rows)] = rows
        stale = np.flatnonzero(batch != self._batch)
        self._change_each(self.layout.batch + stale, batch[stale])
        self._batch, self._batch_rows = batch, rows

    def _change_drafts(
        self, seqs: list[Sequence], rows: Array, given: Mapping[Sequence, list[int]]
    ) -> None:
        layout, most = self.layout, self.layout.most_drafts
        are_given = np.fromiter((seq in given for seq in seqs), np.int64, len(seqs))
        stale = np.flatnonzero(self._is_given[rows] != are_given)
        self._change_each(layout.are_given + rows[stale], are_given[stale])
        self._is_given[rows] = are_given
        for index in np.flatnonzero(are_given).tolist():
            tokens = given[seqs[index]]
            padded = tokens + [NO_DRAFT] * (most - len(tokens))
            self._change(layout.drafts + int(rows[index]) * most, padded)

    def _send_history(self, behind: list[tuple[Sequence, int]]) -> None:
        """Send what the history lacks of rows that the last step did not guess for.

        All their tokens are known but the last one, which is in its place.
        """
        layout = self.layout
        for seq, row in behind:
            self._change(layout.counts + row, [1])
            end = len(seq.token_ids) - 1
            if layout.longest:
                start = int(self._num_sent[row])
                first = layout.history + row * layout.longest
                tokens = np.array(seq.token_ids[start:end], np.int32)
                self._history.append((np.arange(first + start, first + end), tokens))
                self._num_sent[row] = end

    def _resend(self, rows: Array | int) -> None:
        """Let the next decode step write the lengths and the last tokens of rows that are ahead."""
        self._lengths[rows] = self._num_tokens[rows] = UNKNOWN
        self._is_ahead[rows] = False

    def _rows_of(self, seqs: list[Sequence]) -> Array:
        rows = self._rows
        for seq in seqs:
            if seq.seq_id not in rows:
                rows[seq.seq_id] = self._take_row(seq)
            self._owners[rows[seq.seq_id]] = weakref.ref(seq)  # a draft model may copy it again
        return np.array([rows[seq.seq_id] for seq in seqs], np.int64)

    def _take_row(self, seq: Sequence) -> int:
        """A row for a sequence without one; if none is free, first free those not running."""
        if not self._free:
            for seq_id, row in list(self._rows.items()):
                owner = self._owners[row]()
                if owner is None or owner.status is not SequenceStatus.RUNNING:
                    del self._rows[seq_id]
                    self._free.append(row)
        row = self._free.pop()
        if self._is_ahead[row]:
            self._resend(row)
        self._num_tokens[row] = UNKNOWN
        self._num_sent[row] = 0
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


def _words(value: float, dtype: type[np.number]) -> list[int]:
    """A number as 32-bit words."""
    words: list[int] = np.array([value], dtype).view(np.int32).tolist()
    return words
