"""AdapterTensors: the low-rank matrices of one adapter, in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """What adds `(x @ a.T) @ b` to a module's output; b includes the adapter's scale."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [r, out]

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)


@dataclass(frozen=True)
class AdapterTensors:
    """Pairs of matrices by the checkpoint's names of modules: whole ones, for any rank."""

    pairs: Mapping[str, Pair]

    @property
    def num_bytes(self) -> int:
        """Its memory on the host."""
        return sum(each.numel() * each.itemsize for pair in self.pairs.values() for each in pair)

    @property
    def max_rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.pairs.values())
