"""Define the values of GGUF's block types, from the bytes of their blocks.

A block consists of groups of values. All types are `codes * scales + offsets`, in float32 and in
this order, with one scale, and one offset or none, for each group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.operands.block_types import BlockType

# The values of 4-bit codes that stand for no integers of a range.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of e2m1


class Groups(NamedTuple):
    """The values of blocks, before they are multiplied by their scales."""

    codes: Tensor  # integers [..., groups, values of a group]
    scales: Tensor  # float32 [..., groups]
    offsets: Tensor | None = None  # float32 [..., groups]


def dequantize(codes: Tensor, kind: BlockType) -> Tensor:
    """The float32 values [..., kind.size] of blocks, uint8 [..., kind.num_bytes].

    Peak memory: about four times the result.
    """
    assert codes.dtype == torch.uint8 and codes.shape[-1] == kind.num_bytes
    groups = READERS[kind.name](codes)
    values = groups.codes * groups.scales.unsqueeze(-1)
    if groups.offsets is not None:
        values += groups.offsets.unsqueeze(-1)
    return values.flatten(-2)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 [..., 1]."""
    pair = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).float()


def _fields(data: Tensor, bits: int, runs: int = 1) -> Tensor:
    """Split bytes into fields of `bits`: the lowest fields of a run of bytes, then the next ones.

    Returns uint8 [..., 8 / bits * number of bytes].
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).unsqueeze(-1)
    split = data.reshape(*data.shape[:-1], runs, 1, -1) >> shifts & (1 << bits) - 1
    return split.flatten(-3)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, the lowest bit of the first byte first."""
    return _fields(data, 1, runs=data.shape[-1])


def _signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8, device=codes.device)[codes.int()]


def _grouped(codes: Tensor, groups: int) -> Tensor:
    return codes.view(*codes.shape[:-1], groups, -1)


def _q4_0(blocks: Tensor) -> Groups:
    codes = _signed(_fields(blocks[..., 2:], 4), 8)
    return Groups(_grouped(codes, 1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    codes = _fields(blocks[..., 4:], 4)
    return Groups(_grouped(codes, 1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    codes = _fields(blocks[..., 6:], 4) | _bits(blocks[..., 2:6]) << 4
    return Groups(_grouped(_signed(codes, 16), 1), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    codes = _fields(blocks[..., 8:], 4) | _bits(blocks[..., 4:8]) << 4
    return Groups(_grouped(codes, 1), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Groups(_grouped(codes, 1), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    scales, codes = blocks[..., :16], _fields(blocks[..., 16:80], 2, runs=2)
    offsets = -(_half(blocks, 82) * (scales >> 4))
    return Groups(_grouped(codes, 16), _half(blocks, 80) * (scales & 15), offsets)


def _q3_k(blocks: Tensor) -> Groups:
    high = _fields(blocks[..., :32], 1)
    codes = _fields(blocks[..., 32:96], 2, runs=2) | high << 2
    scales = _fields(blocks[..., 96:104], 4) | _fields(blocks[..., 104:108], 2) << 4
    return Groups(_grouped(_signed(codes, 4), 16), _half(blocks, 108) * _signed(scales, 32))


def _scales_of_six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the offsets' factors [..., 8] in the 12 bytes of Q4_K and Q5_K."""
    first, second, last = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    return scales, torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)


def _q4_k(blocks: Tensor) -> Groups:
    scales, offsets = _scales_of_six_bits(blocks[..., 4:16])
    codes = _fields(blocks[..., 16:], 4, runs=4)
    return Groups(_grouped(codes, 8), _half(blocks, 0) * scales, -(_half(blocks, 2) * offsets))


def _q5_k(blocks: Tensor) -> Groups:
    scales, offsets = _scales_of_six_bits(blocks[..., 4:16])
    codes = _fields(blocks[..., 48:], 4, runs=4) | _fields(blocks[..., 16:48], 1) << 4
    return Groups(_grouped(codes, 8), _half(blocks, 0) * scales, -(_half(blocks, 2) * offsets))


def _q6_k(blocks: Tensor) -> Groups:
    codes = _fields(blocks[..., :128], 4, runs=2) | _fields(blocks[..., 128:192], 2, runs=2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Groups(_grouped(_signed(codes, 32), 16), _half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> Groups:
    codes = _looked_up(_fields(blocks[..., 2:], 4), NONLINEAR)
    return Groups(_grouped(codes, 1), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    codes = _looked_up(_fields(blocks[..., 8:], 4, runs=8), NONLINEAR)
    low, high = _fields(blocks[..., 4:8], 4, runs=4), _fields(blocks[..., 2:4], 2, runs=2)
    return Groups(_grouped(codes, 8), _half(blocks, 0) * _signed(low | high << 4, 32))


def _mxfp4(blocks: Tensor) -> Groups:
    """The scale is 2 to the power of its byte minus 128; 2^-127 and 2^-128 are subnormal."""
    exponents = blocks[..., :1].int()
    subnormal = 0x200000 << exponents.clamp(max=1)
    bits = torch.where(exponents < 2, subnormal, exponents - 1 << 23)
    codes = _looked_up(_fields(blocks[..., 1:], 4), MXFP4)
    return Groups(_grouped(codes, 1), bits.view(torch.float32))


READERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
