"""BlockParts: the codes and the scales of blocks of a GGUF file, one by one, in PyTorch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.operands.block_types import BlockType


class BlockParts(NamedTuple):
    """n rows of K values in blocks. A group of values has one scale."""

    codes: Tensor  # uint8 [n, K]
    bits: int
    center: int  # the code of zero
    group: int
    scale_type: str  # "float16", "bfloat16", "bytes" or "nibbles"
    scales: Tensor  # [n, K / group]
    mins: Tensor | None = None  # of the type of scales
    supers: Tensor | None = None  # int32 [n, K / 256]: one or two float16 numbers
    scale_center: int = 0  # the byte of a scale of zero
    numbers: str = "linear"  # how codes become numbers: "linear", "iq4" or "fp4"


def parts_of(codes: Tensor, kind: BlockType) -> BlockParts:
    """Take blocks [n, blocks, num_bytes] apart."""
    return _PARTS[kind.name](codes)


def _split(blocks: Tensor, *sizes: int) -> list[Tensor]:
    """The fields of blocks with these numbers of bytes."""
    return list(torch.split_with_sizes(blocks, sizes, -1))


def _fields(packed: Tensor, bits: int, length: int) -> Tensor:
    """The codes of bytes: the lowest bits of `length` bytes, then their next bits, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    runs = packed.reshape(*packed.shape[:-1], -1, 1, length)
    return torch.flatten(runs >> shifts & ((1 << bits) - 1), -3)


def _bits(packed: Tensor) -> Tensor:
    """The bits of bytes, in order."""
    return _fields(packed, 1, 1)


def _half(packed: Tensor) -> Tensor:
    """A float16 number of each block: [n, blocks]."""
    return packed.contiguous().view(torch.float16).squeeze(-1)


def _super(packed: Tensor) -> Tensor:
    """Two float16 numbers, or one and zero, as a word: [n, blocks]."""
    padded = torch.nn.functional.pad(packed, (0, 4 - packed.shape[-1]))
    return padded.contiguous().view(torch.int32).squeeze(-1)


def _of_32(bits: int, center: int, has_min: bool, numbers: str) -> Callable[[Tensor], BlockParts]:
    """Types of 32 values: the scale, the min, the fifth bits, and codes."""

    def parts(blocks: Tensor) -> BlockParts:
        at = 2 + 2 * has_min
        scales = _half(blocks[..., :2])
        mins = -_half(blocks[..., 2:4]) if has_min else None
        # Of 8 bits: two's complement, in which the code of zero becomes 128.
        codes = blocks[..., at:] ^ 128 if bits == 8 else _fields(blocks[..., -16:], 4, 16)
        if bits == 5:
            codes = codes | _bits(blocks[..., at : at + 4]) << 4
        return BlockParts(
            codes.flatten(1), bits, center, 32, "float16", scales, mins, numbers=numbers
        )

    return parts


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the mins of 8 groups, from 12 bytes."""
    first, second, third = (packed[..., at : at + 4] for at in (0, 4, 8))
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales.flatten(1), mins.flatten(1)


def _q2_k(blocks: Tensor) -> BlockParts:
    scales, codes, supers = _split(blocks, 16, 64, 4)
    return BlockParts(
        _fields(codes, 2, 32).flatten(1), 2, 0, 16, "nibbles", scales.flatten(1), None,
        _super(supers),
    )  # fmt: skip


def _q3_k(blocks: Tensor) -> BlockParts:
    high, low, packed, supers = _split(blocks, 32, 64, 12, 2)
    codes = _fields(low, 2, 32) | _fields(high, 1, 32) << 2
    scales = _fields(packed[..., :8], 4, 8) | _fields(packed[..., 8:], 2, 4) << 4
    return BlockParts(
        codes.flatten(1), 3, 4, 16, "bytes", scales.flatten(1), None, _super(supers), 32
    )


def _q4_k(blocks: Tensor) -> BlockParts:
    supers, packed, low = _split(blocks, 4, 12, 128)
    scales, mins = _six_bits(packed)
    codes = _fields(low, 4, 32).flatten(1)
    return BlockParts(codes, 4, 0, 32, "bytes", scales, mins, _super(supers))


def _q5_k(blocks: Tensor) -> BlockParts:
    supers, packed, high, low = _split(blocks, 4, 12, 32, 128)
    scales, mins = _six_bits(packed)
    codes = _fields(low, 4, 32) | _fields(high, 1, 32) << 4
    return BlockParts(codes.flatten(1), 5, 0, 32, "bytes", scales, mins, _super(supers))


def _q6_k(blocks: Tensor) -> BlockParts:
    low, high, scales, supers = _split(blocks, 128, 64, 16, 2)
    codes = _fields(low, 4, 64) | _fields(high, 2, 32) << 4
    scales = scales.flatten(1) ^ 128
    return BlockParts(codes.flatten(1), 6, 32, 16, "bytes", scales, None, _super(supers), 128)


def _iq4_xs(blocks: Tensor) -> BlockParts:
    supers, high, low, codes = _split(blocks, 2, 2, 4, 128)
    scales = _fields(low, 4, 1) | _fields(high, 2, 1) << 4
    return BlockParts(
        _fields(codes, 4, 16).flatten(1), 4, 128, 32, "bytes", scales.flatten(1), None,
        _super(supers), 32, "iq4",
    )  # fmt: skip


def _mxfp4(blocks: Tensor) -> BlockParts:
    """A scale is two to the power of the byte minus 128, which bfloat16 has: half a step of fp4."""
    exponents = blocks[..., 0].int()
    bits = torch.where(exponents < 2, 1 << exponents + 5, (exponents - 1) << 7)
    scales = bits.to(torch.int16).view(torch.bfloat16)
    codes = _fields(blocks[..., 1:], 4, 16)
    return BlockParts(codes.flatten(1), 4, 0, 32, "bfloat16", scales, numbers="fp4")


_PARTS: dict[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": _of_32(4, 8, False, "linear"),
    "Q4_1": _of_32(4, 0, True, "linear"),
    "Q5_0": _of_32(5, 16, False, "linear"),
    "Q5_1": _of_32(5, 0, True, "linear"),
    "Q8_0": _of_32(8, 128, False, "linear"),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _of_32(4, 128, False, "iq4"),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
