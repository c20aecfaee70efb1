"""Random values in place of a checkpoint's: weights with a deviation of about 0.02.

A stored tensor has the function that fills it, which its format chooses. Scales are constant;
columns that a tensor assigns to groups are in order.
"""

from collections.abc import Callable

import torch

from nanovllm.formats.loaded import DUMMY_DEVIATION

# Fills the tensor of a matrix [N, K], or a stack of them; the second argument is (N, K).
Fill = Callable[[torch.Tensor, tuple[int, int], torch.Generator], object]
FP8_CODES = 64.0  # the deviation of random codes; those of integers are evenly distributed


def normal(deviation: float) -> Fill:
    """Normally distributed numbers, of those that bfloat16 holds, as in most checkpoints."""

    def fill(values: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> None:  # noqa: ARG001
        drawn = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        values.copy_(drawn.normal_(0.0, deviation, generator=generator).bfloat16())

    return fill


def constant(value: float) -> Fill:
    """One number."""
    return lambda values, *_: values.fill_(value)


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


plain_weights = normal(DUMMY_DEVIATION)
