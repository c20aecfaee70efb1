"""How rows are rounded before the product with a weight."""

from nanovllm.kernels.triton.linear import rounded_linear
from nanovllm.kernels.triton.linear.arranged import ArrangedMatrix
from nanovllm.kernels.triton.linear.block_dots import can_dot
from nanovllm.kernels.triton.linear.block_planes import BlockPlanes
from nanovllm.kernels.triton.linear.quantize_rows import RoundingKernels
from nanovllm.kernels.triton.linear.rounded_rows import WORD_ROUNDING, WordRounding


def rounding_of(
    weight: ArrangedMatrix | BlockPlanes, num_rows: int
) -> RoundingKernels | WordRounding | None:
    """The kernels that round `num_rows` rows for this weight; None if they are not rounded."""
    if isinstance(weight, BlockPlanes):
        return WORD_ROUNDING if can_dot(num_rows, weight) else None
    return rounded_linear.rounding_of(weight, num_rows)
