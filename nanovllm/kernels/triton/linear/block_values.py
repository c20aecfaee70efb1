"""The values of a tile of `BlockPlanes` in float32, inside other kernels.

The bits of a code become the mantissa of a number with a known exponent, which is subtracted. Two
codes of up to 6 bits become the halves of a word, each the upper half of a float32 number; a code
of 8 bits is the lowest byte of one. All of this is exact: a value has at most the one rounding of
float32 that the file's definition has. Values come in the registers where tensor cores read them.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.linear.block_planes import RUN

STEPS = tl.constexpr(RUN // 16)  # of tensor cores, with 16 inputs each
QUADS = tl.constexpr(4)  # words of a step
RUN_SIZE = tl.constexpr(RUN)
# The values of IQ4's codes plus 128, from the lowest byte of the first word on.
IQ4_0, IQ4_1, IQ4_2, IQ4_3 = (
    tl.constexpr(word) for word in (0x3F2D1801, 0x766A5D4F, 0xA6998D81 - (1 << 32),
                                    0xF1D9C5B5 - (1 << 32))
)  # fmt: skip


@triton.jit
def load_values(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, run,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, PADDED_N: tl.constexpr,
):  # fmt: skip
    """The weights [outputs, RUN] of outputs n, below PADDED_N, and of the inputs of a run."""
    row = run * PADDED_N + n
    low = _spread(_load_words(low_ptr, row, LOW), LOW)
    high = low
    if HIGH:
        high = _spread(_load_words(high_ptr, row, HIGH), HIGH)
    scale, smallest = load_scales(
        scales_ptr, mins_ptr, supers_ptr, row, n, run, GROUPS, MINS, SUPERS, PADDED_N
    )
    a, b = _pair(low, high, scale, smallest, 0, LOW, HIGH, CENTER, NUMBERS, MINS)
    c, d = _pair(low, high, scale, smallest, 1, LOW, HIGH, CENTER, NUMBERS, MINS)
    pairs = tl.join(tl.join(a, b), tl.join(c, d))  # [outputs, steps, quads, half, pair]
    values = tl.permute(pairs, (0, 1, 4, 2, 3))
    return tl.reshape(values, (n.shape[0], RUN_SIZE))


@triton.jit
def _load_words(ptr, row, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = row[:, None] * (QUADS * BITS) + tl.arange(0, QUADS * BITS)[None, :]
    return tl.load(ptr + at)


@triton.jit
def _spread(words, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words [outputs, 4 * BITS] as [outputs, STEPS, 4], with a step's codes in the lowest bits."""
    N: tl.constexpr = words.shape[0]  # noqa: N806
    EACH: tl.constexpr = STEPS // BITS  # noqa: N806
    words = tl.reshape(words, (N, BITS, 1, QUADS))
    if EACH > 1:
        shift = 2 * BITS * tl.arange(0, EACH)
        words = tl.broadcast_to(words, (N, BITS, EACH, QUADS)) >> shift[None, None, :, None]
    return tl.reshape(words, (N, STEPS, QUADS))


@triton.jit
def load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, mins_ptr, supers_ptr, row, n, run,
    GROUPS: tl.constexpr, MINS: tl.constexpr, SUPERS: tl.constexpr, PADDED_N: tl.constexpr,
):  # fmt: skip
    """The scales, and the mins if there are any, in float32: [outputs, STEPS, 1]."""
    at = row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales_ptr + at)
    if MINS == 2:
        smallest = (scale >> 4).to(tl.float32)
        scale &= 15
    scale = scale.to(tl.float32)
    if MINS == 0:
        smallest = scale
    elif MINS == 1:
        smallest = tl.load(mins_ptr + at).to(tl.float32)
    if SUPERS:
        words = tl.load(supers_ptr + run // 2 * PADDED_N + n)
        scale *= _half(words)[:, None]
        if MINS:
            smallest *= _half(words >> 16)[:, None]
    return _for_steps(scale, GROUPS), _for_steps(smallest, GROUPS)


@triton.jit
def _half(words):  # type: ignore[no-untyped-def]
    """The float16 number in the lower half of a word."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _for_steps(values, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    N: tl.constexpr = values.shape[0]  # noqa: N806
    EACH: tl.constexpr = STEPS // GROUPS  # noqa: N806
    if EACH > 1:
        values = tl.broadcast_to(tl.reshape(values, (N, GROUPS, 1)), (N, GROUPS, EACH))
    return tl.reshape(values, (N, STEPS, 1))


@triton.jit
def _pair(  # type: ignore[no-untyped-def]
    low, high, scale, smallest, J: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CENTER: tl.constexpr, NUMBERS: tl.constexpr, MINS: tl.constexpr,
):  # fmt: skip
    """The values of the J-th two codes of each word: [outputs, STEPS, 4], twice."""
    codes = (low >> J * LOW) & (((1 << LOW) - 1) * 0x10001)
    if HIGH:
        field = (high >> J * HIGH) & (((1 << HIGH) - 1) * 0x10001)
        codes |= field << LOW
    if NUMBERS == "fp4":
        a, b = _of_fp4(codes)
    elif NUMBERS == "iq4":
        a, b = _of_iq4(codes & 15), _of_iq4(codes >> 16)
    elif LOW == 8:
        a, b = _of_byte(codes & 0xFF, CENTER), _of_byte(codes >> 16, CENTER)
    else:
        halves = codes | 0x43004300  # 128 plus the codes, in bfloat16
        a = _float(halves << 16) - (128 + CENTER)
        b = _float(halves & -0x10000) - (128 + CENTER)
    a *= scale
    b *= scale
    if MINS:
        a -= smallest
        b -= smallest
    return a, b


@triton.jit
def _float(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_byte(code, CENTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^23 plus the code, minus 2^23 and the center."""
    return _float(code | 0x4B000000) - (8388608 + CENTER)


@triton.jit
def _of_iq4(code):  # type: ignore[no-untyped-def]
    """Look the code's value up, in one of four words."""
    below = tl.where((code & 4) != 0, IQ4_1, IQ4_0)
    above = tl.where((code & 4) != 0, IQ4_3, IQ4_2)
    word = tl.where((code & 8) != 0, above, below)
    return _of_byte((word >> (code & 3) * 8) & 0xFF, 128)


@triton.jit
def _of_fp4(codes):  # type: ignore[no-untyped-def]
    """Twice the numbers of e2m1: their bits in bfloat16's places, times 2^127 for the exponent."""
    halves = ((codes & 0x00080008) << 12) | ((codes & 0x00070007) << 6)
    return _float(halves << 16) * 2.0**127, _float(halves & -0x10000) * 2.0**127
