"""Quantizing plain weights while they are loaded: matrices [N, K] to a format's tensors."""

from collections.abc import Callable, Mapping

import torch

from nanovllm.layers.layer import Loaded, check_shape
from nanovllm.layers.weights.format import WeightFormat
from nanovllm.layers.weights.stored import Held

FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127, 15
GROUP = 128  # columns that share a 4-bit scale
RANGES = [1 - 0.025 * step for step in range(17)]  # shares of a group's range that are tried
ROWS_AT_A_TIME = 1 << 22  # elements: temporary tensors are a few times as large

Tensors = dict[str, torch.Tensor]


def to_fp8(matrix: torch.Tensor) -> Tensors:
    """e4m3 codes, and a scale for each row."""
    wide = matrix.float()
    scales = _positive(wide.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    codes = (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


def to_int8(matrix: torch.Tensor) -> Tensors:
    """8-bit codes, and a scale for each row."""
    wide = matrix.float()
    scales = _positive(wide.abs().amax(dim=1, keepdim=True) / INT8_MAX)
    codes = (wide / scales).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}


def to_int4(matrix: torch.Tensor) -> Tensors:
    """4-bit codes, and a scale and a zero point for each group of a row's columns.

    Of the ranges tried, each group takes the one with the least squared error.
    """
    num_rows, size_in = matrix.shape
    num_groups = -(-size_in // GROUP)
    rows = max(1, ROWS_AT_A_TIME // max(1, size_in))
    found = [_search(part.float(), num_groups) for part in torch.split(matrix, rows)]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {
        "weight_packed": pack_words(codes.view(num_rows, -1)[:, :size_in]),
        "weight_scale": scales,
        "weight_zero_point": zeros.to(torch.uint8),
    }


def _search(
    matrix: torch.Tensor, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, groups, GROUP], scales and zeros [N, groups] of float32 rows [N, K]."""
    num_rows, size_in = matrix.shape
    groups = matrix.new_zeros(num_rows, num_groups * GROUP)
    groups[:, :size_in] = matrix  # padding adds nothing to the error: 0 has a code
    groups = groups.view(num_rows, num_groups, GROUP)
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    least = torch.full_like(low, torch.inf)
    best = torch.empty_like(low), torch.empty_like(low)
    for share in RANGES:
        scales = _positive(share * (high - low) / INT4_MAX).bfloat16().float()
        zeros = (-share * low / scales).round_().clamp_(0, INT4_MAX)
        codes = _codes(groups, scales, zeros)
        error = codes.sub_(zeros[..., None]).mul_(scales[..., None]).sub_(groups).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
    return _codes(groups, *best).to(torch.uint8), best[0].bfloat16(), best[1]


def _codes(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, INT4_MAX)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [N, K] in 32-bit words [N, ceil(K / 8)], the lowest bits first."""
    num_rows, size_in = codes.shape
    padded = codes.new_zeros(num_rows, -(-size_in // 8) * 8)
    padded[:, :size_in] = codes
    halves = padded.view(num_rows, -1, 2)
    pairs = halves[..., 0] | (halves[..., 1] << 4)
    return pairs.view(torch.int32)


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """Scales of rows that are zero are one."""
    return torch.where(scales > 0, scales, 1.0)


QUANTIZERS: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "fp8": to_fp8, "int8": to_int8, "own": to_int4,
}  # fmt: skip


def load_quantized(
    weight_format: WeightFormat,
    targets: Mapping[str, torch.Tensor],
    held: Held,
    loaded: Loaded,
    projection: int | None,
) -> None:
    """Fill the format's tensors from a plain matrix: of one projection, or of all.

    A rank quantizes whole rows, so that the result does not depend on the number of ranks. Peak
    memory: the rows of a projection, and what the quantizer needs.
    """
    assert weight_format.quantize is not None
    chosen = range(len(held.sizes)) if projection is None else [projection]
    check_shape(loaded, (sum(held.sizes[i] for i in chosen), held.in_features))
    device, first = next(iter(targets.values())).device, 0
    for i in chosen:
        rows = slice(first + held.rows[i].start, first + held.rows[i].stop)
        first += held.sizes[i]
        matrix = loaded[rows].to(device)
        part = Held.whole(len(matrix), held.in_features, held.columns)
        for name, tensor in weight_format.quantize(matrix).items():
            stored = weight_format.tensors[name]
            part.load(stored, held.split(stored, targets[name])[i], tensor, None)
