"""Formats with several codes in a 32-bit word: compressed-tensors' pack-quantized, GPTQ, AWQ, ours.

A weight is `(code - zero) * scale`, with unsigned codes, and scales of each output or of groups of
its columns.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from nanovllm.formats.blocks import places, quantized_matrix, take, unpack
from nanovllm.formats.dummy_values import groups_of, integers, matrix_size, scale_of
from nanovllm.formats.format import COLUMNS, ROWS, Weight, WeightFormat, check_scales
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import Axis, Held, Stored
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the codes of a word, in the order of its 8 outputs

Tensors = Mapping[str, torch.Tensor]


class PackedCodes(WeightFormat):
    """What the formats share: a subclass names its tensors, and unpacks them."""

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
    def codes(self, tensors: Tensors, held: Held) -> torch.Tensor:
        """The codes [..., N, K] of the rows and columns held."""

    @abstractmethod
    def scales(self, tensors: Tensors) -> torch.Tensor:
        """The scales [..., N, groups]."""

    @abstractmethod
    def zeros(self, tensors: Tensors, held: Held) -> torch.Tensor:
        """The zero points [..., N, groups]."""

    def weight(self, tensors: Tensors, held: Held) -> Weight | list[Weight]:
        if self._orders_differ(tensors):
            parts = {name: held.split(self.tensors[name], t) for name, t in tensors.items()}
            return [
                self._matrix(
                    {
                        name: part[i] if self.tensors[name].rows_dim is not None else part[i][None]
                        for name, part in parts.items()
                    },
                    held.only(i),
                )
                for i in range(len(held.sizes))
            ]
        return self._matrix(tensors, held)

    def _orders_differ(self, tensors: Tensors) -> bool:
        """Whether projections assign their columns to groups differently."""
        if not self.scheme.ordered:
            return False
        orders = tensors[self.order_name]
        return not bool((orders == orders[:1]).all())

    def _matrix(self, tensors: Tensors, held: Held) -> QuantizedMatrix:
        middle = 1 << (self.scheme.bits - 1)

        def signed(values: torch.Tensor) -> torch.Tensor:
            return (values ^ middle).view(torch.int8) if middle == 128 else values.char() - middle

        codes = signed(self.codes(tensors, held))
        zeros = signed(self.zeros(tensors, held)) if self.scheme.zeros else None
        rows = torch.arange(held.num_rows, device=codes.device)
        columns = self._groups_of_columns(tensors, held, codes.device)
        scales = _narrowest(check_scales(self.scale_name, self.scales(tensors)))
        return quantized_matrix(codes, scales, zeros, rows, columns, self.scheme.bits)

    def _groups_of_columns(
        self, tensors: Tensors, held: Held, device: torch.device
    ) -> torch.Tensor:
        """Which scale each of the columns held has."""
        size = self.scheme.columns
        if size is None:
            return torch.zeros(held.num_columns, dtype=torch.long, device=device)
        if not self.scheme.ordered:
            return places([held.columns], size, device) // size
        first = tensors[self.order_name][0].long()
        num_groups = -(-held.in_features // size)
        if bool((first < 0).any()) or bool((first >= num_groups).any()):
            raise ValueError(
                f"{self.order_name} has values from {int(first.min())} to {int(first.max())}, but"
                f" there are {num_groups} groups of {size} columns"
            )
        return first


class PackedColumns(PackedCodes):
    """A matrix [N, K] whose codes are packed along K, and its scales [N, groups]."""

    def codes(self, tensors: Tensors, held: Held) -> torch.Tensor:
        return _unpacked(tensors["weight_packed"], self.scheme.bits, -1, [held.columns])

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

    def weight(self, tensors: Tensors, held: Held) -> Weight | list[Weight]:
        shapes = tensors["weight_shape"]  # of each projection, or of all in every row
        sizes = [sum(held.sizes)] if held.is_fused else held.sizes
        needed = shapes.new_tensor([[size, held.in_features] for size in sizes])
        if not bool((shapes == needed).all()):
            raise ValueError(
                f"weight_shape is {shapes.tolist()}, the model needs {needed.tolist()}"
            )
        return super().weight(tensors, held)

    def zeros(self, tensors: Tensors, held: Held) -> torch.Tensor:
        return _unpacked(tensors["weight_zero_point"], self.scheme.bits, -2, held.stored_rows)


class Int4Packed(PackedColumns):
    """What plain weights are quantized to 4 bits as: zero points have a byte each."""

    def make_tensors(self) -> dict[str, Stored]:
        return {
            "weight_packed": Stored((ROWS, Axis(False, self.per_word)), torch.int32, fill=integers),
            "weight_scale": Stored((ROWS, self.groups), torch.bfloat16, fill=self.scale),
            "weight_zero_point": Stored((ROWS, self.groups), torch.uint8, fill=integers),
        }

    def zeros(self, tensors: Tensors, held: Held) -> torch.Tensor:  # noqa: ARG002
        return tensors["weight_zero_point"]


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

    def codes(self, tensors: Tensors, held: Held) -> torch.Tensor:
        return _unpacked(tensors["qweight"], self.scheme.bits, -2, [held.columns]).mT

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].mT

    def zeros(self, tensors: Tensors, held: Held) -> torch.Tensor:
        """The offset is added to whole words: version 1 subtracts it from them, with borrows."""
        ones = sum(1 << shift for shift in range(0, 32, self.scheme.bits))
        words = tensors["qzeros"] + self.scheme.zero_offset * ones
        return _unpacked(words, self.scheme.bits, -1, held.stored_rows).mT


class Awq(PackedCodes):
    """AWQ's GEMM layout: the transposed matrix, packed along rows, mixed within a word."""

    scale_name = "scales"

    def make_tensors(self) -> dict[str, Stored]:
        return {
            "qweight": Stored((COLUMNS, Axis(True, self.per_word)), torch.int32, fill=integers),
            "qzeros": Stored((self.groups, Axis(True, self.per_word)), torch.int32, fill=integers),
            "scales": Stored((self.groups, ROWS), torch.float32, fill=self.scale),
        }

    def codes(self, tensors: Tensors, held: Held) -> torch.Tensor:
        return _awq_unpacked(tensors["qweight"], held).mT

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["scales"].mT

    def zeros(self, tensors: Tensors, held: Held) -> torch.Tensor:
        return _awq_unpacked(tensors["qzeros"], held).mT


def _unpacked(
    words: torch.Tensor, bits: int, dim: int, parts: list[slice] | tuple[slice, ...]
) -> torch.Tensor:
    """The codes of the rows or columns `parts`, whose words are joined along `dim`."""
    return take(unpack(words, bits, dim), dim, places(parts, 32 // bits, words.device))


def _awq_unpacked(words: torch.Tensor, held: Held) -> torch.Tensor:
    mixed = unpack(words, 4, -1).view(*words.shape, 8)
    codes = mixed[..., torch.tensor(AWQ_ORDER, device=words.device)].flatten(-2)
    return take(codes, -1, places(held.stored_rows, 8, words.device))


def _narrowest(scales: torch.Tensor) -> torch.Tensor:
    """The scales in 16 bits if that loses nothing. Syncs."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales.float()):
            return scales.to(dtype)
    return scales
