"""BlockType: a type of ggml, which stores a number of values as one block of bytes.

The table has the types that kernels multiply as they are stored.
"""

from typing import NamedTuple


class BlockType(NamedTuple):
    """A type of a GGUF file: `size` consecutive values of a row are stored in `num_bytes` bytes."""

    name: str
    number: int  # in files
    size: int
    num_bytes: int

    @property
    def bits(self) -> float:
        """Bits of a value, with its part of the scales."""
        return 8 * self.num_bytes / self.size


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("MXFP4", 39, 32, 17),
    )
}
