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

FP8_MAX, INT8_MAX = 448.0, 127
INT4_MIN, INT4_MAX = -8, 7
GROUP = 32  # columns that share a 4-bit scale: as many as in ggml's Q4_0
LEVELS = (-8.5, -8.0, -7.5, -7.0)  # codes to try for the largest weight of a group
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
    scales = _not_zero(matrix.abs().amax(dim=1, keepdim=True) / FP8_MAX)
    codes = (matrix / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


@by_parts(SERIAL)
def to_int8(matrix: torch.Tensor) -> Tensors:
    """8-bit codes, and a scale for each row."""
    scales = _not_zero(matrix.abs().amax(dim=1, keepdim=True) / INT8_MAX)
    codes = (matrix / scales).add_(ROUNDS).sub_(ROUNDS).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}


@by_parts(LARGE)
def to_int4(matrix: torch.Tensor) -> Tensors:
    """4-bit codes, and a scale for each group of a row's columns."""
    num_rows, size_in = matrix.shape
    groups = F.pad(matrix, (0, -size_in % GROUP)).view(-1, GROUP)  # 0 has a code: no error
    scales = _search(groups)
    codes = _nearest(groups, scales, torch.empty_like(groups)).sub_(INT4_MIN)
    return {
        "weight_packed": pack_words(codes.byte().view(num_rows, -1)[:, :size_in]),
        "weight_scale": scales.view(num_rows, -1).bfloat16(),
    }


def _search(groups: torch.Tensor) -> torch.Tensor:
    """Scales [n, 1] of groups [n, GROUP], exact in bfloat16 and of any sign.

    The sign lets the largest weight have a negative code, of which there is one more. Each level
    gives the group codes, for which the best scale is known: c @ w / c @ c. The group takes the
    scale with the least squared error, s * (s * c @ c - 2 * c @ w).
    """
    low, high = (bound.unsqueeze(1) for bound in groups.aminmax(dim=1))
    largest = torch.where(-low > high, low, high)
    codes, each = torch.empty_like(groups), torch.empty_like(groups)
    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for level in LEVELS:
        _nearest(groups, _storable(largest / level), codes)
        product = torch.sum(torch.mul(codes, groups, out=each), 1, keepdim=True)
        square = torch.sum(torch.mul(codes, codes, out=each), 1, keepdim=True)
        scale = _storable(product / square.clamp_(min=1))
        error = scale * (scale * square - 2 * product)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return torch.where(least.isnan(), torch.nan, best)  # of weights that are refused


def _nearest(groups: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the nearest codes to `out`."""
    torch.mul(groups, scales.reciprocal(), out=out)
    return out.clamp_(INT4_MIN, INT4_MAX).add_(ROUNDS).sub_(ROUNDS)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [N, K] in 32-bit words [N, ceil(K / 8)], the lowest bits first."""
    num_rows, size_in = codes.shape
    padded = codes.new_zeros(num_rows, -(-size_in // 8) * 8)
    padded[:, :size_in] = codes
    halves = padded.view(num_rows, -1, 2)
    pairs = halves[..., 0] | (halves[..., 1] << 4)
    return pairs.view(torch.int32)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    return _not_zero(scales.bfloat16().float())


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales that are zero, or almost, by one."""
    return torch.where(scales.abs() < LEAST_SCALE, 1.0, scales)


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
            matrix = loaded[rows].to(device).contiguous()
            own = RankPart.whole(len(matrix), part.in_features, part.columns)
            for name, tensor in self.quantize(matrix).items():
                stored = self.tensors[name]
                own.load(stored, part.split(stored, tensors[name])[i], tensor, None)

    def of_plain(self, matrix: torch.Tensor) -> Tensors:
        return self.quantize(matrix)


def _buffer(name: str) -> str:
    return f"quantized_{name}"
