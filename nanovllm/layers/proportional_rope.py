"""The rope type "proportional": a part of each head's pairs is rotated, and the others not at all.

The pairs are those of a rotation of the whole head, (i, i + D / 2) for a head of D dimensions, and
the frequencies are the fastest of such a rotation. Other families that rotate a part rotate the
first dimensions, as a smaller head.
"""

import torch

from nanovllm.layers.rotary_embedding import Parameters, RotaryEmbedding


def proportional_rope(head_dim: int, max_positions: int, parameters: Parameters) -> RotaryEmbedding:
    """The table for `max_positions` positions; the frequency of pairs at rest is 0."""
    share, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    inv_freq = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
    num_rotated = int(share * head_dim // 2)
    exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq[:num_rotated] = 1.0 / parameters["rope_theta"] ** exponents / factor
    return RotaryEmbedding(inv_freq, 1.0, max_positions)
