"""The device table: a row on the device for each running sequence.

A row has what a decode step needs: the sequence's last token, which the previous step has stored,
its length, which each step increases, and its block tables. `Ledger` is the host's view.
"""

from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.run.transfer import Array, upload_ahead
from nanovllm.kernels.plain.read_table import UNUSED_LENGTH, DraftState, TableState
from nanovllm.layers.ranks import ALONE, Ranks

FEW = 1024  # the most changes that a device reads from the host's memory
UNMARKED = -1
BUFFERS = 3  # at most two steps are in flight while one is launched


class TableLayout:
    """Where each column starts in one memory of 32-bit words: one list of offsets has all changes.

    At most `num_running` sequences run. The last row is unused: batches are padded with it. A row
    has room for `max_blocks` of `block_size` tokens in each cache group, for `most_drafts`, and for
    a history of `longest` tokens. Only if `has_marks` is there a column for the marks that a step
    part reads. `block_parts` has for each group the factor of its block numbers. A row has
    `num_slots` slots of states.
    """

    def __init__(
        self,
        num_running: int,
        max_blocks: int,
        block_size: int,
        most_drafts: int = 0,
        longest: int = 0,
        has_marks: bool = False,
        block_parts: tuple[int, ...] = (1,),
        num_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.num_tables = len(block_parts) + (num_slots > 0)  # of a sequence
        self.has_marks = has_marks
        self.block_parts = block_parts
        self.block_size = block_size
        self.num_rows = num_rows = -(-(num_running + 1) // 4) * 4  # columns are aligned to 16 bytes
        self.max_blocks, self.most_drafts, self.longest = max_blocks, most_drafts, longest
        self.unused_row = num_rows - 1
        self.size = 0
        # The ranks share a step's results. A token has two words, and so has a seed.
        self.tokens = self._add(2)
        has_drafts = most_drafts > 0
        self.lengths = self._add(1)
        self.counts = self._add(has_drafts)
        self.recent = self._add(most_drafts + has_drafts)
        self.seeds = self._add(2)
        self.temperatures = self._add(1)
        self.batch = self._add(1)
        # The tables of one group after another. A model without blocks has one that is not read.
        self.num_block_tables = max(1, len(block_parts))
        self.block_tables = self._add(self.num_block_tables * max_blocks)
        self.drafts = self._add(most_drafts)
        self.limits = self._add(has_drafts)
        self.history = self._add(longest)
        self.marks = self._add(has_marks)
        self.slots = self._add(num_slots)
        self.chance = self.size
        self.size += 1
        assert self.size < 1 << 31, "offsets have 32 bits"

    def block_table(self, group: int, row: int) -> int:
        """Where a row's block table in a group starts."""
        return self.block_tables + (group * self.num_rows + row) * self.max_blocks

    def slots_of(self, row: int) -> int:
        """Where a row's slots start."""
        return self.slots + row * self.num_slots

    def _add(self, width: int) -> int:
        """A further column of `width` words for each row; returns where it starts."""
        start = self.size
        self.size += self.num_rows * width
        return start


class TableChanges(NamedTuple):
    """Words to write, and their offsets in the table."""

    offsets: Array  # int64
    words: Array  # int32


NO_CHANGES = TableChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


class DeviceTable:
    """The table on one rank's device.

    With a kernel `write_words`, the device reads few changes of a step from the host's memory.
    There are several buffers, as the steps before may not have run yet.
    """

    def __init__(
        self,
        layout: TableLayout,
        device: torch.device,
        write_words: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._is_shared = False  # whether all ranks have the last steps' results
        self._write_words = write_words
        if write_words is not None:
            options = dict(dtype=torch.int32, pin_memory=device.type == "cuda")
            buffers = [torch.empty(2, FEW, **options) for _ in range(BUFFERS)]  # type: ignore[call-overload]
            self._buffers = cycle((buffer, buffer.numpy()) for buffer in buffers)
        num_longs = -(-layout.size // 2)
        if device.type == "cpu":  # pages that are never written take no memory
            longs = torch.from_numpy(np.zeros(num_longs, np.int64))
        else:
            longs = torch.zeros(num_longs, dtype=torch.long, device=device)
        self._words = words = longs.view(torch.int32)[: layout.size]
        self.layout = layout

        def column(start: int, width: int = 1) -> torch.Tensor:
            return words[start : start + layout.num_rows * width]

        def matrix(start: int, width: int) -> torch.Tensor:
            return column(start, width).view(layout.num_rows, width)

        most, has_drafts = layout.most_drafts, layout.most_drafts > 0
        groups = layout.num_block_tables
        self.block_tables = column(layout.block_tables, groups * layout.max_blocks).view(
            groups, layout.num_rows, layout.max_blocks
        )
        self.columns = TableState(
            tokens=column(layout.tokens, 2).view(torch.long),
            seeds=column(layout.seeds, 2).view(torch.long),
            lengths=column(layout.lengths),
            temperatures=column(layout.temperatures).view(torch.float32),
            batch=column(layout.batch),
            block_tables=self.block_tables[0],
            drafts=DraftState(
                tokens=matrix(layout.drafts, most),
                limits=column(layout.limits, has_drafts),
                counts=column(layout.counts, has_drafts),
                recent=matrix(layout.recent, most + has_drafts),
                history=matrix(layout.history, layout.longest),
                chance=words[layout.chance :],
            ),
        )
        # A step's results for the next step, on the ranks that have drawn its tokens.
        self.results = words[: layout.seeds] if most else self.columns.tokens
        self.marks = column(layout.marks, layout.has_marks)
        self.slots = matrix(layout.slots, layout.num_slots)
        self.clear()

    def clear(self) -> None:
        """Empty the batch: no row has an owner."""
        self.columns.lengths.fill_(UNUSED_LENGTH)
        self.columns.batch.fill_(self.layout.unused_row)
        self.marks.fill_(UNMARKED)

    def write(self, changes: TableChanges) -> None:
        """Apply changes, in the order of the device's work."""
        size = len(changes.offsets)
        if not size:
            return
        if self._write_words is not None and size <= FEW:
            buffer, array = next(self._buffers)
            array[0, :size], array[1, :size] = changes
            self._write_words(self._words, buffer, size)
            return
        packed = np.empty(size + -(-size // 2), np.int64)
        packed[:size] = changes.offsets
        packed[size:].view(np.int32)[:size] = changes.words
        (uploaded,) = upload_ahead(self._words.device, packed)
        self._words.index_copy_(0, uploaded[:size], uploaded[size:].view(torch.int32)[:size])

    def share(self) -> None:
        """Send the results of the last steps to all ranks, if rank 0 alone has drawn some."""
        if self._ranks.size > 1 and not self._is_shared:
            self._ranks.broadcast(self.results)
        self._is_shared = True

    def draws_alone(self) -> None:
        """Record that rank 0 alone draws the tokens of a step: other ranks lack its results."""
        self._is_shared = False

    def keep_tokens(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store token ids [B] in their rows [B], for the next step to read."""
        self.columns.tokens.index_copy_(0, rows, token_ids)

    def fill_pending(
        self, input_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """A copy of `input_ids` with the last tokens of `rows` at `places`."""
        return input_ids.index_copy(0, places, self.columns.tokens[rows].clamp_(min=0))
