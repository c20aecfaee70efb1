"""Codes of quantized weights as numbers, in few instructions, inside other kernels.

Multiplying quantized weights takes more instructions than bytes: a GPU that reads one byte for each
weight at full speed has about seven instruction slots for it, and half as many for 4 bits. So the
bits of a code become the mantissa of a number with a known exponent, from which a constant is
subtracted: two weights at a time, and all of it exact.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED

# Bytes b3 b2 b1 b0 of $2 become two numbers in $0, two in $1. 0x43 and 0x64 are the upper bytes of
# bfloat16's 128 and of float16's 1024: the lower byte is added to those. The last step is a
# multiply-add, which capability 8.0 has for bfloat16 too.
INT8_TO_BF16 = tl.constexpr(
    """{ .reg .b32 p, q, a, b, one; mov.b32 one, 0xbf80bf80;
    prmt.b32 p, $2, 0x43434343, 0x5140;
    prmt.b32 q, $2, 0x43434343, 0x5342;
    and.b32 a, p, 0xff7fff7f;
    and.b32 b, p, 0xff80ff80;
    fma.rn.bf16x2 $0, b, one, a;
    and.b32 a, q, 0xff7fff7f;
    and.b32 b, q, 0xff80ff80;
    fma.rn.bf16x2 $1, b, one, a; }"""
)  # (128 + the lower 7 bits) - (128 or, with the sign's bit, 256)
INT8_TO_FP16 = tl.constexpr(
    """{ .reg .b32 p, q, a, one, c; mov.b32 one, 0x3c003c00; mov.b32 c, 0xe480e480;
    xor.b32 a, $2, 0x80808080;
    prmt.b32 p, a, 0x64646464, 0x5140;
    prmt.b32 q, a, 0x64646464, 0x5342;
    fma.rn.f16x2 $0, p, one, c;
    fma.rn.f16x2 $1, q, one, c; }"""
)  # (1024 + the code plus 128) - 1152
E4M3_TO_BF16 = tl.constexpr(
    """{ .reg .b32 p, q, a, c, z; mov.b32 c, 0x7b807b80; mov.b32 z, 0x80008000;
    prmt.b32 p, $2, 0, 0x1404;
    prmt.b32 q, $2, 0, 0x3424;
    and.b32 a, p, 0x7f007f00;
    shr.b32 a, a, 4;
    lop3.b32 p, p, 0x80008000, a, 0xea;
    and.b32 a, q, 0x7f007f00;
    shr.b32 a, a, 4;
    lop3.b32 q, q, 0x80008000, a, 0xea;
    fma.rn.bf16x2 $0, p, c, z;
    fma.rn.bf16x2 $1, q, c, z; }"""
)  # exponent and mantissa in their places, times 2^120 for the difference of the exponents' biases
E4M3_TO_FP16 = tl.constexpr(
    """{ .reg .b32 p, q, a, c, z; mov.b32 c, 0x5c005c00; mov.b32 z, 0x80008000;
    prmt.b32 p, $2, 0, 0x1404;
    prmt.b32 q, $2, 0, 0x3424;
    and.b32 a, p, 0x7f007f00;
    shr.b32 a, a, 1;
    lop3.b32 p, p, 0x80008000, a, 0xea;
    and.b32 a, q, 0x7f007f00;
    shr.b32 a, a, 1;
    lop3.b32 q, q, 0x80008000, a, 0xea;
    fma.rn.f16x2 $0, p, c, z;
    fma.rn.f16x2 $1, q, c, z; }"""
)  # the same, times 2^8
LOW_TO_BF16 = tl.constexpr(
    """{ .reg .b32 p, q, a, one, c; mov.b32 one, 0x3f803f80; mov.b32 c, 0xc308c308;
    and.b32 a, $2, 0x0f0f0f0f;
    prmt.b32 p, a, 0x43434343, 0x5140;
    prmt.b32 q, a, 0x43434343, 0x5342;
    fma.rn.bf16x2 $0, p, one, c;
    fma.rn.bf16x2 $1, q, one, c; }"""
)  # (128 + the code plus 8) - 136
HIGH_TO_BF16 = tl.constexpr(
    LOW_TO_BF16.value.replace("and.b32 a, $2", "shr.b32 a, $2, 4; and.b32 a, a")
)
LOW_TO_FP16 = tl.constexpr(
    LOW_TO_BF16.value.replace("bf16x2", "f16x2")
    .replace("0x3f803f80", "0x3c003c00")
    .replace("0xc308c308", "0xe408e408")
    .replace("0x43434343", "0x64646464")
)
HIGH_TO_FP16 = tl.constexpr(
    LOW_TO_FP16.value.replace("and.b32 a, $2", "shr.b32 a, $2, 4; and.b32 a, a")
)


@triton.jit
def unpack(  # type: ignore[no-untyped-def]
    codes, KIND: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Bytes as numbers of `dtype`. KIND is that of an `ArrangedMatrix`.

    Of int4, HALF says which half of each byte: 0 is the low one.
    """
    if INTERPRETED:  # what multiplies them takes float32
        numbers = unpack_plain(codes, KIND, HALF)
    elif dtype == tl.bfloat16:
        BF16: tl.constexpr = (  # noqa: N806
            INT8_TO_BF16 if KIND == "int8" else E4M3_TO_BF16 if KIND == "e4m3"
            else HIGH_TO_BF16 if HALF else LOW_TO_BF16
        )  # fmt: skip
        numbers = tl.inline_asm_elementwise(  # four codes, in one register, at a time
            BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif dtype == tl.float16:
        FP16: tl.constexpr = (  # noqa: N806
            INT8_TO_FP16 if KIND == "int8" else E4M3_TO_FP16 if KIND == "e4m3"
            else HIGH_TO_FP16 if HALF else LOW_TO_FP16
        )  # fmt: skip
        numbers = tl.inline_asm_elementwise(
            FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        numbers = unpack_plain(codes, KIND, HALF)
    return numbers


@triton.jit
def unpack_plain(codes, KIND: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same in float32, in ordinary operations."""
    if KIND == "int8":
        numbers = codes.to(tl.float32)
    elif KIND == "e4m3":  # exponent and mantissa in float16's places, times 2^8
        bits = codes.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        numbers = (((codes >> 4 * HALF) & 15).to(tl.int32) - 8).to(tl.float32)
    return numbers
