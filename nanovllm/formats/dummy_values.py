"""Random values for the tensors of quantized formats. A format chooses a function for each one.

Scales are constant; columns that a tensor assigns to groups are in order.
"""

import torch

from nanovllm.formats.stored import DUMMY_DEVIATION, Fill, constant

FP8_CODES = 64.0  # the deviation of random codes; those of integers are evenly distributed


def scale_of(bits: int | None) -> Fill:
    """The scale of random codes that are integers of `bits`, or FP8 numbers if it is None."""
    deviation = FP8_CODES if bits is None else (1 << bits) / 12**0.5
    return constant(DUMMY_DEVIATION / deviation)


def groups_of(columns: int | None) -> Fill:
    """The group of each column, of all if there is only one."""
    return lambda values, size, _: values.copy_(torch.arange(size[1]) // (columns or size[1]))


def integers(values: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> None:  # noqa: ARG001
    """All integers of the tensor's type are equally likely."""
    info = torch.iinfo(values.dtype)
    values.random_(info.min, info.max + 1, generator=generator)


def matrix_size(values: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> None:  # noqa: ARG001
    """N and K."""
    values.copy_(torch.tensor(size))
