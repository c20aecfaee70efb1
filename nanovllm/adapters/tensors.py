"""AdapterTensors: the low-rank matrices of one adapter, in host memory."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """Two matrices that add `(x @ a.T) @ b` to a module's output; b includes the adapter's scale.

    The matrices of all E experts of a layer are stacked: [E, r, in] and [E, r, out].
    """

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [r, out]

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]

    def pinned(self) -> "Pair":
        """A copy in pinned memory, which a GPU can read directly."""
        return Pair(self.a.pin_memory(), self.b.pin_memory())


AdapterTensors = Mapping[str, Pair]  # by the checkpoint's names of modules: whole, for any rank
