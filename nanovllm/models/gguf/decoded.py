"""Blocks of a GGUF file, read as plain matrices."""

from typing import Any

import torch

from nanovllm.kernels.operands.block_types import BLOCK_TYPES
from nanovllm.kernels.plain.dequantize_blocks import dequantize
from nanovllm.models.gguf.views import View

PART = 1 << 20  # values that are decoded at a time, which takes four times their memory


class Decoded(View):
    """The values of blocks, float32 [..., N, K].

    Only the blocks of an index's rows are decoded, if the index begins with a slice.
    """

    def __init__(self, view: View) -> None:
        super().__init__(view.tensor, "F32")
        self.view, self.kind = view, BLOCK_TYPES[view.get_dtype()]

    def get_shape(self) -> tuple[int, ...]:
        *above, blocks, _ = self.view.get_shape()
        return (*above, blocks * self.kind.size)

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if index and isinstance(index[0], slice):
            others = (slice(None), *index[1:])
            return self._values(self.view[index[0]])[others]
        return self._values(self.view[:])[index]

    def _values(self, blocks: torch.Tensor) -> torch.Tensor:
        *above, in_row, _ = blocks.shape
        flat = blocks.flatten(0, -2)
        values = torch.empty(len(flat), self.kind.size, device=flat.device)
        step = PART // self.kind.size
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            values[part] = dequantize(flat[part], self.kind)
        return values.view(*above, in_row * self.kind.size)


def decoded(view: View) -> View:
    """The values of a view, if it has blocks."""
    return Decoded(view) if view.get_dtype() in BLOCK_TYPES else view
