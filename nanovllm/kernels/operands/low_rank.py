"""LowRank: the adapters of a layer, stacked, as kernels read them.

PairAdditions: adds the adapters of experts.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """For each of G groups of rows, a pair of matrices that adds `(x @ A.T) @ B.T` to them.

    A layer has P projections of the same input of K elements. Projection p has `sizes[p]` outputs;
    together they have N. In group g it has the rank `ranks[g, p]`, at most R; 0 if it has no
    adapter. Its A is in the first rows of `a[g, p * R : (p + 1) * R]`. Its transposed B is in the
    first rows of `b[g]`, in the projection's columns. All other elements are never read.
    """

    a: Tensor  # [G, P * R, K]
    b: Tensor  # [G, R, N]
    ranks: Tensor  # [G, P] int32
    sizes: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        """R."""
        return int(self.b.shape[1])


class PairAdditions(Protocol):
    """Adds adapters to the outputs of experts, in place, for N pairs of a row and an expert.

    Pairs without an adapter, and pairs with an expert of another rank, do not change.
    """

    def add_gates(self, x: Tensor, gates: Tensor, /) -> None:
        """Add the adapters' outputs for rows x [T, hidden] to gates and ups [N, 2 * I]."""

    def add_outputs(self, inner: Tensor, outputs: Tensor, shares: Tensor, /) -> None:
        """Add the adapters' outputs for inner [N, I], times shares [N], to outputs [N, hidden]."""
