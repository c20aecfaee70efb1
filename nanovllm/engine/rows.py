"""A row on the device for each running sequence, and the account of what stands there.

A sequence keeps its row for as long as it runs. A decode step is read off the rows: each one's last
token, which the step before has left there, its length, which goes up by itself, and its block
table. The host tells what the device cannot know: which rows, and their new blocks.
"""

import operator

import numpy as np
import torch

from nanovllm.engine.sampling_inputs import temperature_of
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.transfer import Array, upload_ahead
from nanovllm.kernels.plain import RowState

UNKNOWN = -2  # no length, no number of blocks and no row
NOBODY = -1  # the length of a row that is nobody's


class Layout:
    """Where everything stands in one memory of 32-bit words, so that one list tells all changes.

    `running` sequences at most run; as many may wait for a token that is on its way. The last row
    is nobody's: a batch is filled up with it.
    """

    def __init__(self, running: int, max_blocks: int) -> None:
        self.num_rows = num_rows = -(-(2 * running + 1) // 4) * 4  # all begins at 16 bytes
        self.max_blocks = max_blocks
        self.nobody = num_rows - 1
        self.tokens = 0  # two words each, as are the seeds
        self.seeds = 2 * num_rows
        self.lengths = 4 * num_rows
        self.temperatures = 5 * num_rows
        self.batch = 6 * num_rows
        self.block_tables = 7 * num_rows
        self.size = self.block_tables + num_rows * max_blocks


class Rows:
    """The rows of one rank's device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        num_longs = -(-layout.size // 2)
        if device.type == "cpu":  # pages that nobody writes take no memory
            longs = torch.from_numpy(np.zeros(num_longs, np.int64))
        else:
            longs = torch.zeros(num_longs, dtype=torch.long, device=device)
        words = longs.view(torch.int32)[: layout.size]
        self._words = words
        self.layout = layout
        self.state = RowState(
            tokens=words[: layout.seeds].view(torch.long),
            seeds=words[layout.seeds : layout.lengths].view(torch.long),
            lengths=words[layout.lengths : layout.temperatures].fill_(NOBODY),
            temperatures=words[layout.temperatures : layout.batch].view(torch.float32),
            batch=words[layout.batch : layout.block_tables].fill_(layout.nobody),
            block_tables=words[layout.block_tables :].view(layout.num_rows, layout.max_blocks),
        )

    def write(self, places: Array, words: Array) -> None:
        """Write words to their places, in the order of the device's work."""
        size = len(places)
        if not size:
            return
        changes = np.empty(size + -(-size // 2), np.int64)
        changes[:size] = places
        changes[size:].view(np.int32)[:size] = words
        (there,) = upload_ahead(self._words.device, changes)
        self._words.index_copy_(0, there[:size], there[size:].view(torch.int32)[:size])

    def keep(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Leave token ids [B] for the next step, in their rows [B]."""
        self.state.tokens.index_copy_(0, rows, token_ids)

    def fill(
        self, input_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Input ids with the last tokens of `rows` in these places."""
        return input_ids.index_copy(0, places, self.state.tokens[rows])

    def block_tables(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """The first columns of the block tables of these rows."""
        return self.state.block_tables[:, :width][rows]


class Account:
    """Rank 0's: whose the rows are, and what of it the devices know.

    It relies on how sequences keep their block tables: a list that grows, and another list when
    they begin anew.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.forget()

    def forget(self) -> None:
        """Trust nothing: every sequence starts over, with a row that is told of anew."""
        num_rows = self.layout.num_rows
        self._places: list[int] = []
        self._words: list[int] = []
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(num_rows - 1))[::-1]
        self._tables: list[list[int]] = [[]] * num_rows
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._lengths = np.full(num_rows, UNKNOWN)
        self._num_tokens = np.full(num_rows, UNKNOWN)  # with the one that stands there the last
        self._batch: Array = np.full(num_rows, UNKNOWN)
        self._last_tables: list[list[int]] = []
        self._last_rows: Array = np.zeros(0, np.int64)

    def tell_blocks(self, seqs: list[Sequence]) -> tuple[Array, int]:
        """Let the devices know the block tables; the rows, and the columns of the longest table."""
        tables = [seq.block_table for seq in seqs]
        sizes = np.fromiter(map(len, tables), np.int64, len(tables))
        last = self._last_tables
        if len(tables) != len(last) or not all(map(operator.is_, tables, last)):
            self._last_rows = self._rows_of(seqs)
            for row, table in zip(self._last_rows.tolist(), tables, strict=True):
                if self._tables[row] is not table:
                    self._tables[row] = table
                    self._num_blocks[row] = 0
            self._last_tables = tables
        rows = self._last_rows
        known = self._num_blocks[rows]
        for index in np.flatnonzero(known != sizes).tolist():
            start = int(known[index])
            first = self.layout.block_tables + int(rows[index]) * self.layout.max_blocks
            self._tell(first + start, tables[index][start:])
        self._num_blocks[rows] = sizes
        return rows, int(sizes.max())

    def tell_batch(self, seqs: list[Sequence], rows: Array) -> None:
        """Let the devices know that a decode step is of these rows: their lengths, and its tokens.

        Those have been left there, but for a prompt whose last token is all that is to be computed.
        """
        layout = self.layout
        lengths = np.fromiter((seq.num_cached_tokens for seq in seqs), np.int64, len(seqs))
        for index in np.flatnonzero(self._lengths[rows] != lengths).tolist():
            self._tell(layout.lengths + int(rows[index]), [int(lengths[index])])
        for index in np.flatnonzero(self._num_tokens[rows] != lengths + 1).tolist():
            self._tell(layout.tokens + 2 * int(rows[index]), seqs[index].token_ids[-1:])
        self._lengths[rows] = lengths + 1
        self._num_tokens[rows] = lengths + 2
        batch = np.full(layout.num_rows, layout.nobody)
        batch[: len(rows)] = rows
        for place in np.flatnonzero(batch != self._batch).tolist():
            self._tell(layout.batch + place, [int(batch[place])])
        self._batch = batch

    def changes(self) -> tuple[Array, Array]:
        """What the devices are to be told of a step: places, and words to write there."""
        changes = np.array(self._places, np.int64), np.array(self._words, np.int32)
        self._places.clear()
        self._words.clear()
        return changes

    def expect_tokens(self, seqs: list[Sequence]) -> Array:
        """The rows of these, where a prefill will leave a token for each."""
        rows = self._rows_of(seqs)
        if seqs:
            self._num_tokens[rows] = [len(seq.token_ids) + 1 for seq in seqs]
        return rows

    def _rows_of(self, seqs: list[Sequence]) -> Array:
        rows = self._rows
        for seq in seqs:
            if seq not in rows:
                rows[seq] = self._take_row(seq)
        return np.array([rows[seq] for seq in seqs], np.int64)

    def _take_row(self, seq: Sequence) -> int:
        if not self._free:
            for other in [other for other in self._rows if not _needs_row(other)]:
                self._free.append(self._rows.pop(other))
        row = self._free.pop()
        self._num_tokens[row] = UNKNOWN
        self._tell(self.layout.seeds + 2 * row, _words(seq.seed & (2**64 - 1), np.uint64))
        self._tell(self.layout.temperatures + row, _words(temperature_of(seq), np.float32))
        return row

    def _tell(self, place: int, words: list[int]) -> None:
        self._places += range(place, place + len(words))
        self._words += words


def _needs_row(seq: Sequence) -> bool:
    """Whether it runs, or waits while a token is on its way."""
    waits = seq.status is SequenceStatus.WAITING and seq.num_pending_tokens > 0
    return waits or seq.status is SequenceStatus.RUNNING


def _words(value: float, dtype: type[np.number]) -> list[int]:
    """A number as 32-bit words."""
    words: list[int] = np.array([value], dtype).view(np.int32).tolist()
    return words
