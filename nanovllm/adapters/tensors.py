"""AdapterTensors: the low-rank matrices of one adapter, in host memory."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """What adds `(x @ a.T) @ b` to a module's output; b includes the adapter's scale.

    Those of all E experts of a layer are stacked: [E, r, in] and [E, r, out].
    """

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [r, out]

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]

    def pinned(self) -> "Pair":
        """A copy in memory that a GPU reads by itself."""
        return Pair(self.a.pin_memory(), self.b.pin_memory())


AdapterTensors = Mapping[str, Pair]  # by the checkpoint's names of modules: whole, for any rank
