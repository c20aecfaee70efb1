"""Ranks: the index of this rank, the number of ranks, and how they exchange tensors.

Layers use only this class. A single rank has the whole model and exchanges nothing. A subclass
supports several ranks: it knows processes and devices.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels  # which needs Triton


class Ranks:
    """Rank `rank` of `size`. Every rank must call the exchanges in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self.peer_kernels: PeerKernels | None = None  # which exchange few rows

    def connect_peers(self, kind: "type[PeerKernels] | None") -> None:
        """Set up kernels of this kind, if they work here. Every rank calls it once."""

    def few(self, num_rows: int, like: torch.Tensor) -> "PeerKernels | None":
        """The kernels that sum `num_rows` rows like those of `like`; None if there are none."""
        kernels = self.peer_kernels
        return kernels if kernels and 0 < num_rows <= kernels.most_rows(like) else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x [T, N] on every rank. May overwrite x."""
        assert self.size == 1
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's x on every rank, and overwrite the others' x. x must be contiguous."""
        assert self.size == 1
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' x on rank 0, concatenated in the last dimension; x on the others."""
        assert self.size == 1
        return x

    def minimum(self, number: int) -> int:
        """Return the minimum of all ranks' numbers on every rank."""
        assert self.size == 1
        return number

    def equal_slice(self, total: int) -> slice:
        """Return this rank's slice of `total` elements, a multiple of the number of ranks."""
        if total % self.size:
            raise ValueError(
                f"{self.size} ranks cannot split {total}; the family's `LayerShape.split` must have"
                " all sizes that ranks split"
            )
        length = total // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


ALONE = Ranks()
