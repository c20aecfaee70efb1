"""Size: what a decode graph is captured for, how many sequences and how many queries of each."""

from typing import NamedTuple

MOST_DRAFTS = 256  # of a step: with more, even right ones take longer than they save


class Size(NamedTuple):
    """A decode step's sequences, and queries of each: its last token, and drafts.

    If it `adapts`, some sequences may have adapters.
    """

    num_seqs: int
    num_queries: int = 1
    adapts: bool = False

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


def adapter_sizes(most_drafts: int, largest: int) -> list[Size]:
    """Sizes to capture for steps with adapters: fewer, as they are for some engines' steps only."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    numbers = {n for power in powers for n in (power, power * 3 // 2) if power != 1}
    plain = [Size(number) for number in sorted({1, *numbers, largest}) if number <= largest]
    return [size._replace(adapts=True) for size in [*plain, *draft_sizes(most_drafts, largest)]]


def numbers_of_drafts(most_drafts: int) -> list[int]:
    """How many drafts a step has room for: all, half, a quarter, ... of `most_drafts`."""
    return [most_drafts >> exponent for exponent in range(most_drafts.bit_length())]


def most_within(num_drafts: int, most_drafts: int) -> int:
    """The largest such number that is not above `num_drafts`, 0 if there is none."""
    return max((n for n in numbers_of_drafts(most_drafts) if n <= num_drafts), default=0)


def draft_sizes(most_drafts: int, largest: int) -> list[Size]:
    """Sizes to capture for steps with drafts."""
    sizes = []
    for number in numbers_of_drafts(most_drafts):
        top = min(largest, MOST_DRAFTS // number)
        powers = [1 << exponent for exponent in range(top.bit_length())]
        sizes += [Size(num_seqs, 1 + number) for num_seqs in sorted({*powers, top})]
    return sizes
