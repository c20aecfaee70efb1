"""Formats with several codes in a 32-bit word: compressed-tensors' pack-quantized, GPTQ, AWQ, ours.

A weight is `(code - zero) * scale`, with unsigned codes, and scales of each output or of groups of
its columns.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from nanovllm.formats.blocks import check_scales, places, quantized_matrix, take, unpack
from nanovllm.formats.dummy_values import groups_of, integers, matrix_size, scale_of
from nanovllm.formats.format import LayerWeight, WeightFormat
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import COLUMNS, ROWS, Axis, RankPart, Stored
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the codes of a word, in the order of its 8 outputs

Tensors = Mapping[str, torch.Tensor]


class PackedCodes(WeightFormat):
    """The common part of these formats. A subclass names its tensors, and unpacks them."""

    scale_name = "weight_scale"
    order_name: str
    scheme: Scheme

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.per_word = 32 // scheme.bits
        self.scale = scale_of(scheme.bits)
        self.groups: Axis | int = 1
        if scheme.columns is not None:
            self.groups = Axis(False, scheme.columns, whole=scheme.ordered)
        self._tensors = self.make_tensors()
        if scheme.ordered:
            fill = groups_of(scheme.columns)
            self._tensors[self.order_name] = Stored((COLUMNS,), torch.int32, fill=fill)

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    @abstractmethod
    def make_tensors(self) -> dict[str, Stored]:
        """The tensors of the format, except the order of columns."""

    @abstractmethod
    def codes(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        """The codes [..., N, K] of the rows and columns of the part."""

    @abstractmethod
    def scales(self, tensors: Tensors) -> torch.Tensor:
        """The scales [..., N, groups]."""

    @abstractmethod
    def zeros(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        """The zero points [..., N, groups]."""

    def weight(self, tensors: Tensors, part: RankPart) -> LayerWeight:
        if self._orders_differ(tensors):
            split = {name: part.split(self.tensors[name], t) for name, t in tensors.items()}
            return [
                self._matrix(
                    {
                        name: own[i] if self.tensors[name].rows_dim is not None else own[i][None]
                        for name, own in split.items()
                    },
                    part.only(i),
                )
                for i in range(len(part.sizes))
            ]
        return self._matrix(tensors, part)

    def _orders_differ(self, tensors: Tensors) -> bool:
        """Whether projections assign their columns to groups differently."""
        if not self.scheme.ordered:
            return False
        orders = tensors[self.order_name]
        return not bool((orders == orders[:1]).all())

    def _matrix(self, tensors: Tensors, part: RankPart) -> QuantizedMatrix:
        middle = 1 << (self.scheme.bits - 1)

        def signed(values: torch.Tensor) -> torch.Tensor:
            return (values ^ middle).view(torch.int8) if middle == 128 else values.char() - middle

        codes = signed(self.codes(tensors, part))
        zeros = signed(self.zeros(tensors, part)) if self.scheme.zeros else None
        rows = torch.arange(part.num_rows, device=codes.device)
        columns = self._groups_of_columns(tensors, part, codes.device)
        scales = _narrowest(check_scales(self.scale_name, self.scales(tensors)))
        return quantized_matrix(codes, scales, zeros, rows, columns, self.scheme.bits)

    def _groups_of_columns(
        self, tensors: Tensors, part: RankPart, device: torch.device
    ) -> torch.Tensor:
        """The number of the scale of each column of the part."""
        size = self.scheme.columns
        if size is None:
            return torch.zeros(part.num_columns, dtype=torch.long, device=device)
        if not self.scheme.ordered:
            return places([part.columns], size, device) // size
        first = tensors[self.order_name][0].long()
        num_groups = -(-part.in_features // size)
        if bool((first < 0).any()) or bool((first >= num_groups).any()):
            raise ValueError(
                f"{self.order_name} has values from {int(first.min())} to {int(first.max())}, but"
                f" there are {num_groups} groups of {size} columns"
            )
        return first


class PackedColumns(PackedCodes):
    """A matrix [N, K] with codes that are packed along K, and its scales [N, groups]."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        self.dtype = torch.get_default_dtype()

    def weight(self, tensors: Tensors, part: RankPart) -> LayerWeight:
        from nanovllm.formats.int4_blocks import fastest

        found = super().weight(tensors, part)
        return fastest(found, self.dtype) if isinstance(found, QuantizedMatrix) else found

    def codes(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        return _unpacked(tensors["weight_packed"], self.scheme.bits, -1, [part.columns])

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight_scale"]


class CompressedTensors(PackedColumns):
    """compressed-tensors' "pack-quantized": codes are packed along columns, zeros along rows."""

    order_name = "weight_g_idx"

    def make_tensors(self) -> dict[str, Stored]:
        tensors = {
            "weight_packed": Stored((ROWS, Axis(False, self.per_word)), torch.int32, fill=integers),
            "weight_scale": Stored((ROWS, self.groups), torch.float32, fill=self.scale),
            "weight_shape": Stored((2,), torch.int64, fill=matrix_size),
        }
        if self.scheme.zeros:
            axes = (Axis(True, self.per_word), self.groups)
            tensors["weight_zero_point"] = Stored(axes, torch.int32, fill=integers)
        return tensors

    def weight(self, tensors: Tensors, part: RankPart) -> LayerWeight:
        shapes = tensors["weight_shape"]  # of each projection, or of all in every row
        sizes = [sum(part.sizes)] if part.is_fused else part.sizes
        needed = shapes.new_tensor([[size, part.in_features] for size in sizes])
        if not bool((shapes == needed).all()):
            raise ValueError(
                f"weight_shape is {shapes.tolist()}, the model needs {needed.tolist()}"
            )
        return super().weight(tensors, part)

    def zeros(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        return _unpacked(tensors["weight_zero_point"], self.scheme.bits, -2, part.stored_rows)


class Int4Packed(PackedColumns):
    """The format that plain weights are quantized to with 4 bits, without zero points."""

    def make_tensors(self) -> dict[str, Stored]:
        return {
            "weight_packed": Stored((ROWS, Axis(False, self.per_word)), torch.int32, fill=integers),
            "weight_scale": Stored((ROWS, self.groups), torch.bfloat16, fill=self.scale),
        }

    def zeros(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        raise NotImplementedError("this format has no zero points")


class Gptq(PackedCodes):
    """GPTQ: the transposed matrix, packed along columns. Zeros of version 1 are one too low."""

    scale_name = "scales"
    order_name = "g_idx"

    def make_tensors(self) -> dict[str, Stored]:
        return {
            "qweight": Stored((Axis(False, self.per_word), ROWS), torch.int32, fill=integers),
            "qzeros": Stored((self.groups, Axis(True, self.per_word)), torch.int32, fill=integers),
            "scales": Stored((self.groups, ROWS), torch.float32, fill=self.scale),
        }

    def codes(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        return _unpacked(tensors["qweight"], self.scheme.bits, -2, [part.columns]).mT

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].mT

    def zeros(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        """The offset is added to whole words: version 1 subtracts it from them, with borrows."""
        ones = sum(1 << shift for shift in range(0, 32, self.scheme.bits))
        words = tensors["qzeros"] + self.scheme.zero_offset * ones
        return _unpacked(words, self.scheme.bits, -1, part.stored_rows).mT


class Awq(PackedCodes):
    """AWQ's GEMM layout: the transposed matrix, packed along rows, mixed within a word."""

    scale_name = "scales"

    def make_tensors(self) -> dict[str, Stored]:
        return {
            "qweight": Stored((COLUMNS, Axis(True, self.per_word)), torch.int32, fill=integers),
            "qzeros": Stored((self.groups, Axis(True, self.per_word)), torch.int32, fill=integers),
            "scales": Stored((self.groups, ROWS), torch.float32, fill=self.scale),
        }

    def codes(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        return _awq_unpacked(tensors["qweight"], part).mT

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].mT

    def zeros(self, tensors: Tensors, part: RankPart) -> torch.Tensor:
        return _awq_unpacked(tensors["qzeros"], part).mT


def _unpacked(
    words: torch.Tensor, bits: int, dim: int, parts: list[slice] | tuple[slice, ...]
) -> torch.Tensor:
    """The codes of the rows or columns `parts`, from words that are joined along `dim`."""
    return take(unpack(words, bits, dim), dim, places(parts, 32 // bits, words.device))


def _awq_unpacked(words: torch.Tensor, part: RankPart) -> torch.Tensor:
    mixed = unpack(words, 4, -1).view(*words.shape, 8)
    codes = mixed[..., torch.tensor(AWQ_ORDER, device=words.device)].flatten(-2)
    return take(codes, -1, places(part.stored_rows, 8, words.device))


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The scales in 16 bits if that loses nothing. Syncs."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales.float()):
            return scales.to(dtype)
    return scales
