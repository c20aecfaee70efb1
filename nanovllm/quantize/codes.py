"""Codes: a matrix as integers and scales, and rounding to the nearest of them.

N outputs, K inputs, G groups of the inputs; the last group may be smaller. Values are code * scale.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.formats.quantize import LEAST_SCALE

# For the largest weight of a group: codes to try, by the number of bits. Where inputs with large
# weights count little, a scale may be small, and the largest weights are cut off.
LEVELS = {
    4: tuple(sign * (6.5 + i / 2) for sign in (-1, 1) for i in (0, 1, 2, 3, 4, 6, 8, 11)),
    8: (-128.0, -127.5, 127.0),
}
PART = 1 << 22  # weights whose scales are searched at a time
FLOOR = 0.01  # of the mean importance: inputs that the text never uses are rounded too


class Codes(NamedTuple):
    """Signed codes [N, K] in int8, and scales [N, G] in the type in which files store them."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int

    def values(self, group: int) -> torch.Tensor:
        """The matrix that these stand for, in float32."""
        each = self.scales.float().repeat_interleave(group, dim=1)
        return self.codes.float() * each[:, : self.codes.shape[1]]


def rounded(weight: torch.Tensor, bits: int, group: int | None, dtype: torch.dtype) -> Codes:
    """The nearest codes of a float32 matrix, with scales of `dtype` for groups or outputs."""
    size = group or weight.shape[1]
    scales = best_scales(weight, None, bits, size, dtype)
    codes = nearest(weight, scales.repeat_interleave(size, dim=1)[:, : weight.shape[1]], bits)
    return Codes(codes.to(torch.int8), scales.to(dtype), bits)


def nearest(values: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, as float32."""
    half = 1 << (bits - 1)
    return (values / scales).round_().clamp_(-half, half - 1)


def best_scales(
    weight: torch.Tensor, importance: torch.Tensor | None, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Scales [N, G] of a matrix, in float32 but with values of `dtype`.

    A group takes the scale with the least squared error, of which an input counts by its
    `importance` [K]; None: all inputs count alike. Weights that are not finite are a ValueError.
    """
    if not bool(weight.isfinite().all()):
        raise ValueError("weights that are NaN or infinite cannot be quantized")
    padding = (0, -weight.shape[1] % group)
    factors = weight.new_ones(weight.shape[1]) if importance is None else with_floor(importance)
    factors = F.pad(factors, padding).view(-1, group)
    rows = max(1, PART // max(1, weight.shape[1]))
    found = [
        _search(F.pad(part, padding).view(len(part), -1, group), factors, bits, dtype)
        for part in torch.split(weight, rows)
    ]
    return torch.cat(found)


def with_floor(importance: torch.Tensor) -> torch.Tensor:
    """The importance of inputs, with more than zero for each."""
    mean = importance.mean()
    return importance + FLOOR * mean if bool(mean > 0) else torch.ones_like(importance)


def _search(
    groups: torch.Tensor, factors: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Scales [n, G] of groups [n, G, size], with factors [G, size] for squared errors.

    A scale may be negative: then the largest weight has a negative code, of which there is one
    more. Each level gives codes, for which the best scale is known.
    """
    low, high = groups.aminmax(dim=2)
    largest = torch.where(-low > high, low, high)
    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for level in LEVELS[bits]:
        codes = nearest(groups, storable(largest / level, dtype)[..., None], bits)
        weighted = codes * factors
        product, square = (weighted * groups).sum(2), (weighted * codes).sum(2)
        scale = storable(product / square.clamp(min=torch.finfo(torch.float32).tiny), dtype)
        codes = nearest(groups, scale[..., None], bits)
        error = (codes * scale[..., None] - groups).square_().mul_(factors).sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def storable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest values of `dtype`; ones in place of zeros."""
    kept = scales.to(dtype).float()
    return torch.where((kept.abs() < LEAST_SCALE) | ~kept.isfinite(), 1.0, kept)
