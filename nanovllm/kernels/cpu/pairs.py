"""Plain bfloat16 weights in pairs of inputs, for processors with units that multiply them.

pairs.h has the layout, and pair_amx.h the order of sums, which is the same for any number of rows.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.cpu import huge_pages


def to_units(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Copy a weight [N, K] to [tiles, units, 2, pairs, outputs of a half], with zeros at the end.

    Its elements are int32: pairs of numbers. A unit has `size` inputs and outputs.
    """
    missing = [-length % size for length in weight.shape]
    if any(missing):
        weight = F.pad(weight, (0, missing[1], 0, missing[0]))
    weight = weight.contiguous()
    if weight.storage_offset() % 2:  # a part of a larger tensor, which has no pairs there
        weight = weight.clone()
    pairs = weight.view(torch.int32)
    parts = pairs.view(-1, 2, size // 2, weight.shape[1] // size, size // 2)
    return huge_pages.contiguous(parts.permute(0, 3, 1, 4, 2))


def of_units(units: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The weight of this shape that `to_units` copied."""
    tiles, count, _, half, _ = units.shape
    pairs = units.permute(0, 2, 4, 1, 3).reshape(tiles * 2 * half, count * half)
    return pairs.view(torch.bfloat16)[: shape[0], : shape[1]].contiguous()
