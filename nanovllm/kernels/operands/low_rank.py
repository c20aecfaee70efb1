"""LowRank: the adapters of a layer, stacked, as kernels read them.

PairAdditions: what adds those of experts.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """For each of G groups of rows, a pair of matrices that adds `(x @ A.T) @ B.T` to them.

    A layer has P projections of one input of K elements, the outputs of which, `sizes` of them, are
    joined to N. Projection p of group g has rank `ranks[g, p]`, at most R; 0 if it has no adapter.
    Its A are the first of the R rows `a[g, p * R : (p + 1) * R]`, and its transposed B is in the
    first rows of `b[g]`, in the projection's columns. All else is never read.
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
    """What adds adapters to the outputs of experts, in place, for N pairs of a row and an expert.

    A pair without an adapter, or with an expert of another rank, is left as it is.
    """

    def add_gates(self, x: Tensor, gates: Tensor, /) -> None:
        """From rows x [T, hidden] to gates and ups [N, 2 * I]."""

    def add_outputs(self, inner: Tensor, outputs: Tensor, shares: Tensor, /) -> None:
        """From inner [N, I] to outputs [N, hidden] that are multiplied by shares [N]."""
