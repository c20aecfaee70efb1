"""A row on the device for each running sequence, and the account of what stands there.

A sequence keeps its row for as long as it runs. A decode step is read off the rows: each one's last
token, which the step before has left there, its length, which goes up by itself, and its block
table. The host tells what the device cannot know: which rows, and their new blocks.
"""

import operator
import weakref
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus
from nanovllm.engine.step.draw_inputs import temperature_of
from nanovllm.engine.step.transfer import Array, upload_ahead
from nanovllm.kernels.plain.read_table import UNUSED_LENGTH, TableState

UNKNOWN = -2  # no length, and no row


class Layout:
    """Where everything stands in one memory of 32-bit words, so that one list tells all changes.

    At most `running` sequences run. The last row is nobody's: a batch is filled up with it.
    """

    def __init__(self, running: int, max_blocks: int) -> None:
        self.num_rows = num_rows = -(-(running + 1) // 4) * 4  # so all begins at 16 bytes
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
        self.state = TableState(
            tokens=words[: layout.seeds].view(torch.long),
            seeds=words[layout.seeds : layout.lengths].view(torch.long),
            lengths=words[layout.lengths : layout.temperatures].fill_(UNUSED_LENGTH),
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


class News(NamedTuple):
    """What the devices are told of a step: words for places; how wide its block tables are."""

    width: int
    places: Array
    words: Array


class Account:
    """Rank 0's: whose the rows are, and what of it the devices know.

    It relies on how sequences keep their block tables: a list that grows, and another list when
    they begin anew. A token on its way stands in its sequence's row until that is known to the
    host: none that waits is scheduled before, so those that run need rows, and no others.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.forget()

    def forget(self) -> None:
        """Trust nothing: every sequence starts over, with a row that is told of anew."""
        num_rows = self.layout.num_rows
        self._places: list[int] = []
        self._words: list[int] = []
        self._rows: dict[int, int] = {}  # by seq_id
        self._owners: dict[int, weakref.ref[Sequence]] = {}  # by row
        self._free = list(range(num_rows - 1))[::-1]
        self._tables: list[list[int]] = [[]] * num_rows
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._lengths = np.full(num_rows, UNKNOWN)
        self._num_tokens = np.full(num_rows, UNKNOWN)  # with the one that stands there the last
        self._batch: Array = np.full(num_rows, UNKNOWN)
        self._last_tables: list[list[int]] = []
        self._last_rows: Array = np.zeros(0, np.int64)

    def decode(self, seqs: list[Sequence]) -> News:
        """A decode step of these: what is new of it.

        Its tokens have been left in the rows, but for a prompt whose last token alone is to be
        computed.
        """
        layout = self.layout
        rows, width = self._tell_blocks(seqs)
        lengths = np.fromiter((seq.num_cached_tokens for seq in seqs), np.int64, len(seqs))
        stale = np.flatnonzero(self._lengths[rows] != lengths)
        self._tell_each(layout.lengths + rows[stale], lengths[stale])
        for index in np.flatnonzero(self._num_tokens[rows] != lengths + 1).tolist():
            token_id = seqs[index].token_ids[-1]
            assert token_id != PENDING
            self._tell(layout.tokens + 2 * int(rows[index]), [token_id, 0])
        self._lengths[rows] = lengths + 1
        self._num_tokens[rows] = lengths + 2
        batch = np.full(layout.num_rows, layout.nobody)
        batch[: len(rows)] = rows
        stale = np.flatnonzero(batch != self._batch)
        self._tell_each(layout.batch + stale, batch[stale])
        self._batch = batch
        return self._news(width)

    def prefill(
        self, seqs: list[Sequence], sampling_seqs: list[Sequence]
    ) -> tuple[Array, Array, News]:
        """A prefill of these and their followers: their rows, those of its tokens, what is new."""
        rows, width = self._tell_blocks(seqs)
        token_rows = self._rows_of(sampling_seqs)
        if sampling_seqs:
            self._num_tokens[token_rows] = [len(seq.token_ids) + 1 for seq in sampling_seqs]
        return rows, token_rows, self._news(width)

    def _tell_blocks(self, seqs: list[Sequence]) -> tuple[Array, int]:
        """Tell of blocks that are new. Returns the rows, and the length of the longest table."""
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

    def _rows_of(self, seqs: list[Sequence]) -> Array:
        rows = self._rows
        for seq in seqs:
            if seq.seq_id not in rows:
                rows[seq.seq_id] = self._take_row(seq)
        return np.array([rows[seq.seq_id] for seq in seqs], np.int64)

    def _take_row(self, seq: Sequence) -> int:
        """A row for a sequence that has none; if there is none left, of those that do not run."""
        if not self._free:
            for seq_id, row in list(self._rows.items()):
                owner = self._owners[row]()
                if owner is None or owner.status is not SequenceStatus.RUNNING:
                    del self._rows[seq_id]
                    self._free.append(row)
        row = self._free.pop()
        self._owners[row] = weakref.ref(seq)
        self._num_tokens[row] = UNKNOWN
        self._tell(self.layout.seeds + 2 * row, _words(seq.seed & (2**64 - 1), np.uint64))
        self._tell(self.layout.temperatures + row, _words(temperature_of(seq), np.float32))
        return row

    def _tell(self, place: int, words: list[int]) -> None:
        """Words for a place, and the places behind it."""
        self._places += range(place, place + len(words))
        self._words += words

    def _tell_each(self, places: Array, words: Array) -> None:
        self._places += places.tolist()
        self._words += words.tolist()

    def _news(self, width: int) -> News:
        news = News(width, np.array(self._places, np.int64), np.array(self._words, np.int32))
        self._places.clear()
        self._words.clear()
        return news


def _words(value: float, dtype: type[np.number]) -> list[int]:
    """A number as 32-bit words."""
    words: list[int] = np.array([value], dtype).view(np.int32).tolist()
    return words
