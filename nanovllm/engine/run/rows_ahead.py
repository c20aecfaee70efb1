"""RowsAhead: what the ledger asks about table rows that are ahead of the host."""

from typing import Protocol

from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.transfer import Array
from nanovllm.engine.schedule.sequence import Sequence


class RowsAhead(Protocol):
    """Rows that are ahead: after drafts, the device knows more tokens than the host."""

    def reset(self) -> None:
        """Forget all rows: all sequences start over."""

    def give(self, row: int) -> bool:
        """Give a row to another sequence. Returns whether it was ahead."""

    def stop(self, seqs: list[Sequence], rows: Array) -> Array:
        """Mark the rows of `seqs` as no longer ahead. Returns the rows that were ahead."""

    def extend(self, seq: Sequence, row: int, start: int) -> None:
        """Record that a sequence has new blocks, from `start` in its first table."""

    def limit(self, seqs: list[Sequence], rows: Array, indices: list[int]) -> None:
        """Send the device the number of tokens that the sequences at `indices` have room for."""

    def decode(self, seqs: list[Sequence], rows: Array, lengths: Array, num_drafts: int) -> Array:
        """Record a decode step. Returns which rows were not ahead before it."""

    def added_to(self, changes: TableChanges) -> TableChanges:
        """These changes, and the changes for rows ahead since the last call."""
