"""Cuts: the filters min_p, top_k and top_p, which limit the tokens to draw from."""

from dataclasses import dataclass

import torch

BLOCK = 64  # tokens that are searched together for the most likely ones


@dataclass(slots=True)
class Cuts:
    """The filters of R rows: [R, 1] each. A row without a filter has a value that keeps all tokens.

    A filter is None if no row has it. If `num_candidates` is not 0, it is at least every top_k, and
    rows are drawn only from their first `num_candidates` tokens. A row with both top_k and top_p
    needs this, because top_p is a share of the mass that top_k keeps.
    """

    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    num_candidates: int = 0

    def of(self, rows: slice) -> "Cuts":
        """The filters of some of the rows."""
        columns = (self.min_p, self.top_k, self.top_p)
        min_p, top_k, top_p = (None if x is None else x[rows] for x in columns)
        return Cuts(min_p, top_k, top_p, self.num_candidates)


def are_few(number: int, size: int) -> bool:
    """Whether searching blocks is worthwhile for the first `number` of `size` tokens."""
    return 2 * number * BLOCK <= size
