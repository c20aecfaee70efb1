"""Convert codes of quantized weights to numbers, in few instructions, inside other kernels.

Multiplying quantized weights takes more instructions than bytes: a GPU that reads one byte for each
weight at full speed has about seven instruction slots for it, and half as many for 4 bits. So the
bits of a code become the mantissa of a number with a known exponent, and a constant is subtracted
from it: two weights at a time, and exactly. Codes are in the order of `arranged.in_word_order`, so
that the numbers are in the registers where the tensor cores read them.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED

# Word $4 is converted to the numbers of its bytes 0, 2, 1, 3 in $0 to $3. `p` and `q` are pairs of
# 16-bit numbers, of bytes 0 and 2, and of bytes 1 and 3. 0x4300 and 0x6400 are bfloat16's 128 and
# float16's 1024; the lowest bits of a code are added to these. Each last step is a multiply-add,
# which capability 8.0 has for bfloat16 too.
_BODY = """{ .reg .b32 v, p, q, a, b, c, d;
    OPERATIONS
    mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; }"""


def _of_pairs(constants: str, first: str, other: str) -> tl.constexpr:
    """Instructions that make p of v = $4, and q of v shifted to where p's bits were."""
    return tl.constexpr(_BODY.replace("OPERATIONS", f"{constants} {first} {other}"))


def _int8(step: str, out: str) -> str:
    """128 plus the lower 7 bits, minus 128 or, with the sign's bit, 256."""
    return f"""{step}
    lop3.b32 a, v, 0x007f007f, c, 0xea;
    lop3.b32 b, v, 0x00800080, c, 0xea;
    fma.rn.bf16x2 {out}, b, d, a;"""


def _biased(step: str, out: str, mask: str, table: str, kind: str) -> str:
    """Join the bits of `mask` with c, and add d."""
    return f"""{step}
    lop3.b32 a, v, {mask}, c, {table};
    fma.rn.{kind} {out}, a, b, d;"""


def _e4m3(step: str, out: str, shift: int, kind: str) -> str:
    """Put exponent and mantissa in their places, and multiply by c for the different bias."""
    return f"""{step}
    and.b32 a, v, 0x7f007f00;
    shr.b32 a, a, {shift};
    lop3.b32 a, v, 0x80008000, a, 0xea;
    fma.rn.{kind} {out}, a, c, d;"""


def _pairs(make, constants: str, first: str, other: str, *args):  # type: ignore[no-untyped-def]
    return _of_pairs(constants, make(first, "p", *args), make(other, "q", *args))


AS_IS, NEXT = "mov.b32 v, $4;", "shr.b32 v, $4, 8;"
UPPER = "shl.b32 v, $4, 8;"  # for e4m3: its bits are taken from upper bytes
OR, XOR = "0xea", "0x6a"  # combine the two bits that `and` leaves with the bits of c
FP16_1024 = "mov.b32 b, 0x3c003c00;"

INT8_TO_BF16 = _pairs(_int8, "mov.b32 c, 0x43004300; mov.b32 d, 0xbf80bf80;", AS_IS, NEXT)
INT8_TO_FP16 = _pairs(  # (1024 + the code plus 128) - 1152
    _biased, FP16_1024 + "mov.b32 c, 0x64806480; mov.b32 d, 0xe480e480;", AS_IS, NEXT,
    "0x00ff00ff", XOR, "f16x2",
)  # fmt: skip
E4M3_TO_BF16 = _pairs(
    _e4m3, "mov.b32 c, 0x7b807b80; mov.b32 d, 0x80008000;", UPPER, AS_IS, 4, "bf16x2"
)  # times 2^120
E4M3_TO_FP16 = _pairs(
    _e4m3, "mov.b32 c, 0x5c005c00; mov.b32 d, 0x80008000;", UPPER, AS_IS, 1, "f16x2"
)  # times 2^8


def _int4(constants: str, kind: str, bias: str) -> tuple[tl.constexpr, tl.constexpr]:
    """Instructions for the low and the high codes of bytes: c plus the code plus 8, plus a bias."""
    shifts = ((AS_IS, NEXT), ("shr.b32 v, $4, 4;", "shr.b32 v, $4, 12;"))
    low, high = (
        _pairs(_biased, f"{constants} mov.b32 d, {bias};", *steps, "0x000f000f", OR, kind)
        for steps in shifts
    )
    return low, high


INT4_BF16 = "mov.b32 c, 0x43004300; mov.b32 b, 0x3f803f80;", "bf16x2"
INT4_FP16 = "mov.b32 c, 0x64006400; mov.b32 b, 0x3c003c00;", "f16x2"
LOW_TO_BF16, HIGH_TO_BF16 = _int4(*INT4_BF16, "0xc308c308")
LOW_TO_FP16, HIGH_TO_FP16 = _int4(*INT4_FP16, "0xe408e408")
# With zero points, the bias is $5: an output's zero point plus the constant above, negative, in
# both halves.
LOW_BIASED_TO_BF16, HIGH_BIASED_TO_BF16 = _int4(*INT4_BF16, "$5")
LOW_BIASED_TO_FP16, HIGH_BIASED_TO_FP16 = _int4(*INT4_FP16, "$5")


@triton.jit
def unpack(  # type: ignore[no-untyped-def]
    words, zeros, like, KIND: tl.constexpr, HALF: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Convert words [N, W] to numbers [N, 4 * W] of the type of `like`, minus zeros [N] if ZEROS.

    The conversion is exact. KIND is that of an `ArrangedMatrix`. For int4, HALF says which half of
    each byte is converted: 0 is the low half.
    """
    if INTERPRETED or like.dtype == tl.float32:
        numbers = unpack_plain(words, KIND, HALF)
        if ZEROS:
            numbers -= zeros.to(tl.float32)[:, None]
    elif KIND == "int4" and ZEROS:
        bias = -zeros.to(tl.float32) - (136.0 if like.dtype == tl.bfloat16 else 1032.0)
        bits = bias.to(like.dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        twice = (bits | bits << 16).to(tl.int32, bitcast=True)
        BIASED: tl.constexpr = (  # noqa: N806
            (HIGH_BIASED_TO_BF16 if HALF else LOW_BIASED_TO_BF16) if like.dtype == tl.bfloat16
            else HIGH_BIASED_TO_FP16 if HALF else LOW_BIASED_TO_FP16
        )  # fmt: skip
        a, b, c, d = tl.inline_asm_elementwise(
            BIASED, "=h,=h,=h,=h,r,r", [words, twice[:, None]],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=1,
        )  # fmt: skip
        numbers = _in_order(a, b, c, d)
    else:
        BF16: tl.constexpr = (  # noqa: N806
            INT8_TO_BF16 if KIND == "int8" else E4M3_TO_BF16 if KIND == "e4m3"
            else HIGH_TO_BF16 if HALF else LOW_TO_BF16
        )  # fmt: skip
        FP16: tl.constexpr = (  # noqa: N806
            INT8_TO_FP16 if KIND == "int8" else E4M3_TO_FP16 if KIND == "e4m3"
            else HIGH_TO_FP16 if HALF else LOW_TO_FP16
        )  # fmt: skip
        a, b, c, d = tl.inline_asm_elementwise(
            BF16 if like.dtype == tl.bfloat16 else FP16, "=h,=h,=h,=h,r", [words],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=1,
        )  # fmt: skip
        numbers = _in_order(a, b, c, d)
        if ZEROS:
            numbers -= zeros.to(like.dtype)[:, None]
    return numbers


@triton.jit
def _in_order(a, b, c, d):  # type: ignore[no-untyped-def]
    """The numbers of bytes 0, 2, 1 and 3 of words [N, W], in the order of their inputs."""
    N: tl.constexpr = a.shape[0]  # noqa: N806
    W: tl.constexpr = a.shape[1]  # noqa: N806
    pairs = tl.join(tl.join(a, b), tl.join(c, d))  # [N, W, 2 of a pair, 2 pairs]
    of_16 = tl.reshape(pairs, (N, W // 4, 4, 2, 2))
    return tl.reshape(tl.permute(of_16, (0, 1, 4, 2, 3)), (N, 4 * W))


@triton.jit
def unpack_plain(words, KIND: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same in float32, in ordinary operations."""
    return _in_order(
        _number(words, KIND, HALF), _number(words >> 16, KIND, HALF),
        _number(words >> 8, KIND, HALF), _number(words >> 24, KIND, HALF),
    )  # fmt: skip


@triton.jit
def _number(bits, KIND: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of the lowest byte."""
    if KIND == "int8":
        number = ((bits << 24) >> 24).to(tl.float32)
    elif KIND == "e4m3":  # exponent and mantissa in float16's places, times 2^8
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        number = ((bits >> 4 * HALF & 15) - 8).to(tl.float32)
    return number
