"""Random values for parameters. A format chooses a function for each of its tensors.

Scales are constant; columns that a tensor assigns to groups are in order.
"""

import torch
from torch import nn

from nanovllm.formats.stored import Fill, StoredTensor

DUMMY_DEVIATION = 0.02  # of random weights
FP8_CODES = 64.0  # the deviation of random codes; those of integers are evenly distributed


def dummy_values(param: nn.Parameter, generator: torch.Generator) -> torch.Tensor | None:
    """Random values for a whole parameter, of all ranks together.

    None if it stays as it is, with the `initial` value of its layer: norm weights are ones. Values
    are drawn in float32: the bytes of a type decide how PyTorch draws, and the values must not
    depend on that.
    """
    if isinstance(param, StoredTensor):
        values = torch.empty(param.whole_shape(), dtype=param.dtype, device=generator.device)
        fill = param.stored.fill or plain_weights
        fill(values, param.rank_part.stored_size(param.stored), generator)
        return values
    if param.dim() == 1:
        return None
    values = torch.empty(param.shape, dtype=torch.float32, device=generator.device)
    return values.normal_(0.0, DUMMY_DEVIATION, generator=generator).to(param.dtype)


def normal(deviation: float) -> Fill:
    """Fill with normally distributed numbers, rounded to bfloat16 as in most checkpoints."""

    def fill(values: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> None:  # noqa: ARG001
        drawn = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        values.copy_(drawn.normal_(0.0, deviation, generator=generator).bfloat16())

    return fill


def constant(value: float) -> Fill:
    """Fill with one number."""
    return lambda values, *_: values.fill_(value)


plain_weights = normal(DUMMY_DEVIATION)


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
