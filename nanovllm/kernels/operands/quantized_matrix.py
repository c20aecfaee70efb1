"""QuantizedMatrix: a weight as codes and scales, the same for every checkpoint format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight [N, K], or a stack of weights [E, N, K]: `(codes - zeros) * scales`.

    `codes` has an element for each weight: float8_e4m3fn, or int8; codes of 4 bits are int8 from -8
    to 7. Each scale and zero point belongs to a block of `block[0]` outputs and `block[1]` inputs;
    blocks at the ends of a matrix may be smaller. If `order` [K] is given, column j multiplies
    input `order[j]`. Several columns may have the same input if all except one of them are zero.

    `rounds_inputs` allows kernels to round the inputs to the type of the codes, which is faster if
    the device multiplies that type. All inputs have the scale `input_scale`; without it, each row
    has its own. `input_dtype` is the type of most inputs, if it is known.
    """

    codes: torch.Tensor
    scales: torch.Tensor  # [..., ceil(N / block[0]), ceil(K / block[1])], any float type
    zeros: torch.Tensor | None  # int8, with the shape of `scales`
    block: tuple[int, int]
    bits: int  # the size of a code: 8 or 4
    order: torch.Tensor | None = None
    rounds_inputs: bool = False
    input_scale: torch.Tensor | None = None
    input_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        *stack, size_out, size_in = self.codes.shape
        blocks = [-(-size_out // self.block[0]), -(-size_in // self.block[1])]
        assert list(self.scales.shape) == [*stack, *blocks], (self.codes.shape, self.scales.shape)
        assert self.zeros is None or self.zeros.shape == self.scales.shape
        assert self.codes.dtype in (torch.int8, torch.float8_e4m3fn)


def stacked(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Stack matrices of one shape, kind and order to [E, N, K]. Peak memory: twice theirs."""
    first = matrices[0]
    assert all(other.block == first.block for other in matrices) and same_order(matrices)

    def stack(values: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [value for value in values if value is not None]
        return torch.stack(there) if there else None

    return replace(
        first,
        codes=torch.stack([matrix.codes for matrix in matrices]),
        scales=torch.stack([matrix.scales for matrix in matrices]),
        zeros=stack([matrix.zeros for matrix in matrices]),
        input_scale=stack([matrix.input_scale for matrix in matrices]),
    )


def same_order(matrices: Sequence[QuantizedMatrix]) -> bool:
    """Whether the columns of all matrices multiply the inputs in one order."""
    first, *others = (matrix.order for matrix in matrices)
    if first is None:
        return all(order is None for order in others)
    return all(order is not None and torch.equal(order, first) for order in others)
