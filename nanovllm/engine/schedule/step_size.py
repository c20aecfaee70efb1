"""Size: what a decode graph is captured for, how many sequences and how many queries of each."""

from typing import NamedTuple


class Size(NamedTuple):
    """A decode step's sequences, and queries of each: its last token, and guessed ones.

    If it `is_marked`, some sequences may have marks, which a step part reads.
    """

    num_seqs: int
    num_queries: int = 1
    is_marked: bool = False

    @property
    def num_rows(self) -> int:
        """Queries of all sequences."""
        return self.num_seqs * self.num_queries

    def holds(self, other: "Size") -> bool:
        """Whether a graph of this size computes a step of the other."""
        return self.num_seqs >= other.num_seqs and self[1:] == other[1:]


def batch_ladder(largest: int) -> list[int]:
    """Numbers of sequences to capture: 1, 2, 4, then every 4, and `largest` itself at the top.

    From 32 on it is every 16. From 128 to 256 it is every 8: there large layers become bound by
    arithmetic, which padding adds to.
    """
    sizes = (
        1, 2, *range(4, 32, 4), *range(32, 128, 16), *range(128, 256, 8),
        *range(256, largest, 16),
    )  # fmt: skip
    return [size for size in sizes if size < largest] + [largest]
