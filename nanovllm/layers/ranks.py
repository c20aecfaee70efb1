"""The ranks that share a model's layers: which one this is, and how they exchange tensors.

The layers know ranks by this class alone. One rank by itself holds everything and exchanges
nothing; several are a subclass's, which knows processes and devices.
"""

import torch


class Ranks:
    """`rank` of `size`. Every rank must call the exchanges, in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, for all of them; x may be overwritten."""
        assert self.size == 1
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, which is contiguous, for all of them; the others' is overwritten."""
        assert self.size == 1
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 all ranks' x, side by side in the last dimension; x itself on the others."""
        assert self.size == 1
        return x

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, for all of them."""
        assert self.size == 1
        return number

    def share(self, total: int) -> slice:
        """Which of `total` equal things are this rank's; the ranks divide them."""
        assert total % self.size == 0
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def deal(self, total: int) -> slice:
        """Which of `total` things are this rank's, if none has more than one above the others."""
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)


ALONE = Ranks()
