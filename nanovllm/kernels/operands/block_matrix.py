"""BlockMatrix: a weight in the blocks of a GGUF file."""

from dataclasses import dataclass

import torch

from nanovllm.kernels.operands.block_types import BlockType


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A weight [N, K]. Each row is a sequence of blocks, whose bytes are those of the file."""

    codes: torch.Tensor  # uint8 [N, K / kind.size, kind.num_bytes], contiguous
    kind: BlockType

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8 and self.codes.dim() == 3
        assert self.codes.shape[2] == self.kind.num_bytes

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1] * self.kind.size
