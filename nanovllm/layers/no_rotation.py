"""NoRotation: a rope that rotates nothing, for kernels that rotate."""

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.layers.rotary_embedding import RotaryEmbedding


class NoRotation(RotaryEmbedding):
    """Cosines of 1 and sines of 0, for `size` numbers at any position."""

    def __init__(self, size: int) -> None:
        nn.Module.__init__(self)
        self.num_pairs = size // 2

    def forward(self, positions: torch.Tensor) -> Rope:
        """Cosines and sines [T, 1, R / 2] each."""
        cos, sin = positions.new_zeros(2, len(positions), 1, self.num_pairs, dtype=torch.float32)
        return cos.fill_(1), sin
