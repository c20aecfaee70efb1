"""BlockFormat: a matrix in a GGUF file's blocks, which kernels multiply as they are stored."""

from collections.abc import Mapping

import torch

from nanovllm.formats.format import Weight, WeightFormat
from nanovllm.formats.gguf import BlockScheme
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import ROWS, Axis, Fill, RankPart, Stored
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BlockType
from nanovllm.kernels.plain.dequantize_blocks import dequantize

# Where each type has numbers in float16. In random blocks they are about 2^-8.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip
SMALL = 0x1C  # the high byte of such a number
EXPONENT = 120  # of a block of MXFP4


class BlockFormat(WeightFormat):
    """Blocks along the columns of a matrix.

    A rank's part that begins or ends inside of a block becomes a plain weight of the model's type.
    """

    def __init__(self, scheme: Scheme) -> None:
        assert isinstance(scheme, BlockScheme)
        self.scheme, self.kind = scheme, scheme.kind
        self.dtype = torch.get_default_dtype()
        axes = (ROWS, Axis(False, self.kind.size), self.kind.num_bytes)
        self._tensors = {"weight": Stored(axes, torch.uint8, fill=random_blocks(self.kind))}

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> Weight:
        codes, size = tensors["weight"].detach(), self.kind.size
        start = part.columns.start % size
        if not start and not part.num_columns % size:
            return BlockMatrix(codes, self.kind)
        values = dequantize(codes, self.kind).flatten(1)
        return values[:, start : start + part.num_columns].to(self.dtype)


def random_blocks(kind: BlockType) -> Fill:
    """Fill with random blocks of a type, whose values are about as large as random weights."""

    def fill(values: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> None:
        from nanovllm.formats.dummy_values import integers

        integers(values, size, generator)
        if kind.name == "MXFP4":
            values[..., 0] = EXPONENT
        for place in HALVES.get(kind.name, (0,)):
            values[..., place + 1] = SMALL

    return fill
