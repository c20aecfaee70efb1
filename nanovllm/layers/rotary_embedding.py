"""Rotary position embedding: the table of cosines and sines. `norm_rope_store` applies it.

Frequencies follow transformers' definitions of each `rope_type`. `rope_types.py` has all types
except the default one; it is loaded when a model needs it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.plain.norm_rope_store import Rope

Parameters = Mapping[str, Any]


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions 0 .. max_positions-1, in float32: [P, 2, R / 2].

    R is the number of rotated dimensions of a head: all of them, in most models. The table is
    always computed on the CPU: at large angles, devices differ in the last bits.
    """

    def __init__(self, inv_freq: torch.Tensor, scaling: float, max_positions: int) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inv_freq)
        table = torch.stack([angles.cos(), angles.sin()], dim=1) * scaling
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rope:
        """Look up a step's positions [T] once for all layers: cos and sin, [T, 1, R / 2] each."""
        table: torch.Tensor = self.get_buffer("table")
        cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cos, sin


def rope_frequencies(
    head_dim: int, max_positions: int, max_position_embeddings: int, parameters: Parameters
) -> tuple[torch.Tensor, float]:
    """Frequencies [R / 2] for contexts up to `max_positions`, and the factor of cosines and sines.

    An unknown rope type or a missing parameter is a ValueError.
    """
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated
    inv_freq = 1.0 / parameters["rope_theta"] ** exponents
    if parameters["rope_type"] == "default":
        return inv_freq, 1.0
    from nanovllm.layers.rope_types import scaled_frequencies

    return scaled_frequencies(inv_freq, max_positions, max_position_embeddings, parameters)


def get_rope(
    head_dim: int, max_positions: int, max_position_embeddings: int, parameters: Parameters
) -> RotaryEmbedding:
    """Build the table for `max_positions` positions. Raises as `rope_frequencies` does."""
    inv_freq, scaling = rope_frequencies(
        head_dim, max_positions, max_position_embeddings, parameters
    )
    return RotaryEmbedding(inv_freq, scaling, max_positions)
