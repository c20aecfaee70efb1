"""Quantizing plain weights while they are loaded: matrices [N, K] to a format's tensors."""

from collections.abc import Callable, Mapping
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.formats.format import LayerWeight, Rename, WeightFormat, as_it_is
from nanovllm.formats.stored import (
    COLUMNS,
    ROWS,
    Loaded,
    RankPart,
    Stored,
    StoredTensor,
    check_shape,
)

FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127, 15
GROUP = 128  # columns that share a 4-bit scale
SHARES = [1 - 0.05 * step for step in range(9)]  # shares of a group's range to try
# Weights quantized at a time. PyTorch computes up to SERIAL elements in the calling thread, which
# takes less time than waiting for other threads. For quantizers of many calls, parts are larger.
SERIAL, LARGE, ON_GPU = (1 << 15) - 1, 1 << 20, 1 << 24
ROUNDS = 1.5 * 2**23  # adding it rounds a small float32; `round` uses threads for any tensor
LEAST_SCALE = torch.finfo(torch.float32).tiny

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[torch.Tensor], Tensors]


def by_parts(size: int) -> Callable[[Quantizer], Quantizer]:
    """Quantize in float32, and about `size` weights at a time on a CPU, always whole rows.

    Weights that are not finite are a ValueError. Peak memory: the result twice, and temporaries of
    the size of a part.
    """

    def wrap(quantize: Quantizer) -> Quantizer:
        @wraps(quantize)
        def quantize_all(matrix: torch.Tensor) -> Tensors:
            weights = size if matrix.device.type == "cpu" else ON_GPU
            rows = max(1, weights // max(1, matrix.shape[1]))
            parts = [quantize(part.float()) for part in torch.split(matrix, rows)]
            tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            if not tensors["weight_scale"].isfinite().all():
                raise ValueError("weights that are NaN, infinite or too large to be quantized")
            return tensors

        return quantize_all

    return wrap


@by_parts(SERIAL)
def to_fp8(matrix: torch.Tensor) -> Tensors:
    """e4m3 codes, and a scale for each row."""
    scales = _positive(matrix.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    codes = (matrix / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


@by_parts(SERIAL)
def to_int8(matrix: torch.Tensor) -> Tensors:
    """8-bit codes, and a scale for each row."""
    scales = _positive(matrix.abs().amax(dim=1, keepdim=True) / INT8_MAX)
    codes = (matrix / scales).add_(ROUNDS).sub_(ROUNDS).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}


@by_parts(LARGE)
def to_int4(matrix: torch.Tensor) -> Tensors:
    """4-bit codes, and a scale and a zero point for each group of a row's columns."""
    num_rows, size_in = matrix.shape
    groups = F.pad(matrix, (0, -size_in % GROUP)).view(-1, GROUP)  # 0 has a code: no error
    scales, zeros = _search(groups)
    codes = _nearest(groups, scales, zeros, torch.empty_like(groups)).add_(zeros)
    return {
        "weight_packed": pack_words(codes.byte().view(num_rows, -1)[:, :size_in]),
        "weight_scale": scales.view(num_rows, -1).bfloat16(),
        "weight_zero_point": zeros.view(num_rows, -1).byte(),
    }


def _search(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, exact in bfloat16, and zero points [n, 1] of groups [n, GROUP].

    Each share of a group's range gives it codes, for which the best scale is known: c @ w / c @ c.
    The group takes the scale with the least squared error, s * (s * c @ c - 2 * c @ w).
    """
    low, high = (bound.unsqueeze(1) for bound in groups.aminmax(dim=1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    shares = torch.tensor(SHARES, device=groups.device)[:, None, None]
    first = _storable(shares * ((high - low) / INT4_MAX))
    zeros = (-low * shares / first).round_().clamp_(0, INT4_MAX)  # [shares, n, 1]
    products, squares = torch.empty_like(first), torch.empty_like(first)
    codes, each = torch.empty_like(groups), torch.empty_like(groups)
    for i in range(len(SHARES)):
        _nearest(groups, first[i], zeros[i], codes)
        torch.sum(torch.mul(codes, groups, out=each), 1, keepdim=True, out=products[i])
        torch.sum(codes.square_(), 1, keepdim=True, out=squares[i])
    scales = _storable(products / squares.clamp(min=1))
    best = (scales * (scales * squares - 2 * products)).argmin(0, keepdim=True)
    return scales.gather(0, best)[0], zeros.gather(0, best)[0]


def _nearest(
    groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write the nearest codes, less the zero points, to `out`."""
    torch.mul(groups, scales.reciprocal(), out=out)
    torch.maximum(out, -zeros, out=out)
    torch.minimum(out, INT4_MAX - zeros, out=out)
    return out.add_(ROUNDS).sub_(ROUNDS)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [N, K] in 32-bit words [N, ceil(K / 8)], the lowest bits first."""
    num_rows, size_in = codes.shape
    padded = codes.new_zeros(num_rows, -(-size_in // 8) * 8)
    padded[:, :size_in] = codes
    halves = padded.view(num_rows, -1, 2)
    pairs = halves[..., 0] | (halves[..., 1] << 4)
    return pairs.view(torch.int32)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    return _positive(scales.bfloat16().float())


def _positive(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales of rows that are zero, or almost, by one."""
    return torch.where(scales < LEAST_SCALE, 1.0, scales)


QUANTIZERS: dict[str, Quantizer] = {
    "fp8": to_fp8, "int8": to_int8, "int4": to_int4,
}  # fmt: skip


SOURCE = Stored((ROWS, COLUMNS))  # a plain weight that is quantized


class WhileLoading(WeightFormat):
    """Plain weights that are quantized while they are loaded, to what another format stores.

    The checkpoint fills a `weight` that has no memory: it is quantized into the other format's
    tensors, which are buffers of the layer.
    """

    def __init__(self, stored_as: WeightFormat, quantize: Quantizer) -> None:
        self.stored_as, self.quantize = stored_as, quantize
        self.scheme = stored_as.scheme

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self.stored_as.tensors

    @property
    def filled(self) -> list[str]:
        return ["weight"]

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> LayerWeight:
        return self.stored_as.weight(tensors, part)

    def register(
        self, layer: nn.Module, part: RankPart, stack: tuple[int, ...] = (),
        rename: Rename = as_it_is,
    ) -> RankPart:  # fmt: skip
        for name, stored in self.tensors.items():
            layer.register_buffer(_buffer(rename(name)), part.new(stored, stack).data)
        with torch.device("meta"):
            layer.register_parameter(rename("weight"), part.new(SOURCE, stack))
        return part

    def registered(self, layer: nn.Module, rename: Rename = as_it_is) -> Tensors:
        return {name: getattr(layer, _buffer(rename(name))) for name in self.tensors}

    def drop(self, layer: nn.Module, rename: Rename = as_it_is) -> None:
        for name in (rename("weight"), *(_buffer(rename(name)) for name in self.tensors)):
            setattr(layer, name, None)

    def load(
        self,
        param: StoredTensor,
        target: torch.Tensor,
        loaded: Loaded,
        projection: int | None,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Quantize a plain matrix, of one projection or of all, into `tensors`.

        A rank quantizes whole rows, so that the result does not depend on the number of ranks. Peak
        memory: the rows of a projection, and what the quantizer needs.
        """
        if param.stored is not SOURCE:  # a bias
            super().load(param, target, loaded, projection, tensors)
            return
        part = param.rank_part
        chosen = range(len(part.sizes)) if projection is None else [projection]
        check_shape(loaded, (sum(part.sizes[i] for i in chosen), part.in_features))
        device = next(iter(tensors.values())).device
        for i, rows in zip(chosen, part.rows_in(chosen), strict=True):
            matrix = loaded[rows].to(device)
            own = RankPart.whole(len(matrix), part.in_features, part.columns)
            for name, tensor in self.quantize(matrix).items():
                stored = self.tensors[name]
                own.load(stored, part.split(stored, tensors[name])[i], tensor, None)

    def of_plain(self, matrix: torch.Tensor) -> Tensors:
        return self.quantize(matrix)


def _buffer(name: str) -> str:
    return f"quantized_{name}"
