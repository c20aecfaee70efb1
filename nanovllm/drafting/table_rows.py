"""TableRows: rank 0's records, and the data that it sends, for drafts guessed on the device."""

import numpy as np

from nanovllm.drafting.drafted_blocks import DraftedBlocks, Missing
from nanovllm.engine.run.device_table import TableChanges, TableLayout
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.read_table import CHANCE_BITS


class TableRows:
    """The ledger's `RowsAhead`: which rows are ahead, and which tokens the guesser has seen.

    After a step with drafts only the device knows a row's last token and length: the row is ahead.
    The guesser has seen all tokens of a row that is ahead. Tokens of other rows may be missing:
    they are sent to the row's history, or a draft model computes them before the next step with
    drafts. `longest` is the most tokens of a sequence that a draft model computes.
    """

    def __init__(self, layout: TableLayout, longest: int | None = None) -> None:
        self._layout, self._longest = layout, longest
        self.block_size = layout.block_size
        self.reset()

    def reset(self) -> None:
        """Forget all records: all sequences start over."""
        num_rows = self._layout.num_rows
        self.missing: list[Missing] = []  # in the step that begins
        self._offsets: list[int] = []
        self._words: list[int] = []
        self._history: list[tuple[Array, Array]] = []  # offsets and words, which are many
        self._is_ahead = np.zeros(num_rows, bool)
        self._num_seen = np.zeros(num_rows, np.int64)  # first tokens that the guesser has seen
        longest = self._longest
        self._drafted = DraftedBlocks(self.block_size, longest) if longest else None

    def set_chance(self, chance: float) -> None:
        """Make the device accept drafts by chance, right or wrong: for measurements."""
        self._change(self._layout.chance, int(chance * 2**CHANCE_BITS))

    def give(self, row: int) -> bool:
        """Give a row to another sequence. Returns whether it was ahead."""
        was_ahead = bool(self._is_ahead[row])
        self._is_ahead[row], self._num_seen[row] = False, 0
        return was_ahead

    def stop(self, seqs: list[Sequence], rows: Array) -> Array:
        """Mark the rows of `seqs` as no longer ahead. Returns the rows that were ahead."""
        is_ahead = self._is_ahead[rows]
        stopped: Array = rows[is_ahead]
        if len(stopped):
            self._fall_behind(rows, np.array([seq.num_cached_tokens for seq in seqs]))
            self._is_ahead[stopped] = False
        return stopped

    def extend(self, seq: Sequence, row: int, start: int) -> None:
        """Record that a sequence has new blocks, from `start` in its first table."""
        if self._drafted and self._is_ahead[row]:
            self._drafted.claim(seq, start)

    def limit(self, seqs: list[Sequence], rows: Array, indices: list[int]) -> None:
        """Send the device the number of tokens for which the sequences at `indices` have room."""
        for index in indices:
            limit = min(seqs[index].room, seqs[index].max_num_tokens - 1)
            self._change(self._layout.limits + int(rows[index]), limit)

    def decode(self, seqs: list[Sequence], rows: Array, lengths: Array, num_drafts: int) -> Array:
        """Record a decode step. Returns which rows were not ahead before it.

        With drafts the guesser sees the missing tokens of these rows.
        """
        is_behind: Array = ~self._is_ahead[rows]
        if not num_drafts and not is_behind.all():
            self._fall_behind(rows, lengths)
        self._is_ahead[rows] = num_drafts > 0
        self.missing = []
        if num_drafts:
            for index in np.flatnonzero(is_behind).tolist():
                self._let_see(seqs[index], int(rows[index]))
        return is_behind

    def added_to(self, changes: TableChanges) -> TableChanges:
        """These changes, and the changes for drafts since the last call."""
        if not self._offsets and not self._history:
            return changes
        own = np.array(self._offsets, np.int64), np.array(self._words, np.int32)
        columns = zip(changes, own, *self._history, strict=True)
        self._offsets, self._words, self._history = [], [], []
        return TableChanges(*map(np.concatenate, columns))

    def _fall_behind(self, rows: Array, lengths: Array) -> None:
        """Record the tokens that the guesser has seen of rows that are ahead, by the known lengths.

        It has seen all tokens except the last one when the last step began, which added at most
        1 + `most_drafts`.
        """
        is_ahead = self._is_ahead[rows]
        seen = lengths[is_ahead] - 1 - self._layout.most_drafts
        self._num_seen[rows[is_ahead]] = np.maximum(self._num_seen[rows[is_ahead]], seen)

    def _let_see(self, seq: Sequence, row: int) -> None:
        """Let the guesser see the tokens of a row that is behind, by a history or a draft model.

        The host knows all its tokens except the last one, for which there is a placeholder.
        """
        self._change(self._layout.counts + row, 1)
        start, end = int(self._num_seen[row]), len(seq.token_ids) - 1
        if self._layout.longest:
            first = self._layout.history + row * self._layout.longest
            tokens = np.array(seq.token_ids[start:end], np.int32)
            self._history.append((np.arange(first + start, first + end), tokens))
        if self._drafted:
            end = min(end, self._drafted.longest)
            start = self._drafted.complete(seq, start, end)
            if start < end:
                self.missing.append(Missing(seq, row, start, end))
        self._num_seen[row] = end

    def _change(self, offset: int, word: int) -> None:
        self._offsets.append(offset)
        self._words.append(word)
