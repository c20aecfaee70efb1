"""The values of a tile of `BlockPlanes` in float32, inside other kernels.

The bits of a code become the mantissa of a number with a known exponent, which is subtracted; they
stay where they are in their word, and their scale is divided by two to the power of their place.
All of this is exact: a value has at most the one rounding of float32 that the file's definition
has. A thread loads the codes that it will multiply in a tensor core: lane 4 * r + q of a warp has
the outputs r and r + 8 of 16, and for each 16 inputs those of q (see `BlockPlanes`). So values stay
in the registers in which they are computed.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED

MAGIC = tl.constexpr(0x4B000000)  # 2^23, to whose bits a code is added
# The values of IQ4's codes plus 128, from the lowest byte of the first word on.
IQ4_0, IQ4_1 = tl.constexpr(0x3F2D1801), tl.constexpr(0x766A5D4F)
IQ4_2, IQ4_3 = tl.constexpr(0xA6998D81 - (1 << 32)), tl.constexpr(0xF1D9C5B5 - (1 << 32))
# Look the four lower nibbles of $1 up: among the first 8 values, among the others, and choose by
# the highest bit of each nibble.
LOOK_UP = tl.constexpr(
    """{ .reg .b32 a, b, s;
    and.b32 s, $1, 0x7777;
    prmt.b32 a, $2, $3, s;
    prmt.b32 b, $4, $5, s;
    shr.b32 s, $1, 1;
    and.b32 s, s, 0x4444;
    or.b32 s, s, 0x3210;
    prmt.b32 $0, a, b, s; }"""
)
AND_OR = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xea;")  # $1 & $2 | $3


@triton.jit
def lanes(first_n, N: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper and the lower output of each lane of a tile, below N: [2 * BLOCK_N]."""
    lane = tl.arange(0, 2 * BLOCK_N)
    n = first_n + lane // 32 * 16 + lane % 32 // 4
    return tl.minimum(n, N - 1), tl.minimum(n + 8, N - 1)


@triton.jit
def load_values(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, other_n, run,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
    WEIGHT_N: tl.constexpr,
):  # fmt: skip
    """The weights [outputs, 128] of a run of inputs, for the outputs of each lane."""
    upper = _of_lanes(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, run, LOW, HIGH,
                      CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS, WEIGHT_N)  # fmt: skip
    lower = _of_lanes(low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, other_n, run, LOW, HIGH,
                      CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS, WEIGHT_N)  # fmt: skip
    TILES: tl.constexpr = n.shape[0] // 32  # noqa: N806
    # Tile, r, q, j, h, the three bits of a step, upper or lower.
    values = tl.reshape(tl.join(upper, lower), (TILES, 8, 4, 2, 2, 2, 2, 2, 2))
    values = tl.permute(values, (0, 8, 1, 7, 6, 5, 3, 2, 4))
    return tl.reshape(values, (16 * TILES, 128))


@triton.jit
def _of_lanes(  # type: ignore[no-untyped-def]
    low_ptr, high_ptr, scales_ptr, mins_ptr, supers_ptr, n, run,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
    WEIGHT_N: tl.constexpr,
):  # fmt: skip
    """The values of one output of each lane: [lanes, 4, 2, 2, 2], a step's lowest bit first."""
    row = run * WEIGHT_N + n
    slot = row * 4 + tl.arange(0, n.shape[0]) % 4
    even, odd = _load_low(low_ptr, row, slot, LOW)
    if NUMBERS == "iq4":
        even, odd = look_up(even), look_up(odd)
    high = even
    if HIGH:
        high = _load_plane(high_ptr, slot, HIGH)
    PAIRS: tl.constexpr = SCALES == "float16" or SCALES == "bfloat16"  # noqa: N806
    WORDS: tl.constexpr = GROUPS // 2 if PAIRS else GROUPS // 4  # of scales  # noqa: N806
    first = tl.load(scales_ptr + row * WORDS)
    second, first_min, second_min, d, d_min = first, first, first, first, first
    if WORDS == 2:
        second = tl.load(scales_ptr + row * 2 + 1)
    if MINS and SCALES != "nibbles":
        first_min = tl.load(mins_ptr + row * WORDS)
        second_min = first_min
        if WORDS == 2:
            second_min = tl.load(mins_ptr + row * 2 + 1)
    if not PAIRS:
        d = tl.load(supers_ptr + run // 2 * WEIGHT_N + n)
        d_min = float16_of(d >> 16)
        d = float16_of(d)
    a = _two_steps(even, odd, high, first, second, first_min, second_min, d, d_min, 0, LOW, HIGH,
                   CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS)  # fmt: skip
    b = _two_steps(even, odd, high, first, second, first_min, second_min, d, d_min, 2, LOW, HIGH,
                   CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS)  # fmt: skip
    c = _two_steps(even, odd, high, first, second, first_min, second_min, d, d_min, 4, LOW, HIGH,
                   CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS)  # fmt: skip
    e = _two_steps(even, odd, high, first, second, first_min, second_min, d, d_min, 6, LOW, HIGH,
                   CENTER, NUMBERS, GROUPS, SCALES, SCALE_CENTER, MINS)  # fmt: skip
    return tl.join(tl.join(a, b), tl.join(c, e))


@triton.jit
def _load_plane(ptr, slot, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of each w, from bit 0 on: [lanes, 4]."""
    N: tl.constexpr = slot.shape[0]  # noqa: N806
    words = tl.load(ptr + slot[:, None] * BITS + tl.arange(0, BITS)[None, :])
    EACH: tl.constexpr = 4 // BITS  # noqa: N806
    if EACH > 1:
        shift = tl.arange(0, EACH) * BITS
        words = tl.reshape(words, (N, BITS, 1)) >> shift[None, None, :]
    return tl.reshape(words, (N, 4))


@triton.jit
def _load_low(ptr, row, slot, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of even and of odd steps, from bit 0 on: [lanes, 4] each."""
    if BITS == 8:
        at = (row * 16 + slot * 4)[:, None] + tl.arange(0, 4)[None, :]
        even = tl.load(ptr + at)
        odd = tl.load(ptr + at + 16)
    else:
        even = _load_plane(ptr, slot, BITS)
        odd = even >> 16
    return even, odd


@triton.jit
def float16_of(words):  # type: ignore[no-untyped-def]
    """The number in the lower half of a word."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _two_steps(  # type: ignore[no-untyped-def]
    even, odd, high, first, second, first_min, second_min, d, d_min, STEP: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, CENTER: tl.constexpr, NUMBERS: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
):  # fmt: skip
    """The values of the even step STEP and of the next one: [lanes, 4, 2]."""
    BYTES: tl.constexpr = LOW == 8 or NUMBERS == "iq4"  # noqa: N806
    # Where the codes are in their words, and where they remain.
    AT: tl.constexpr = STEP * 4 if BYTES else STEP * 2  # noqa: N806
    PLACE: tl.constexpr = AT % 16 if NUMBERS != "fp4" else 0  # noqa: N806
    GROUP: tl.constexpr = STEP * GROUPS // 8  # noqa: N806
    scale, smallest = _scale(first, second, first_min, second_min, d, d_min, GROUP, SCALES,
                             SCALE_CENTER, MINS)  # fmt: skip
    next_scale, next_smallest = scale, smallest
    if GROUPS == 8:
        next_scale, next_smallest = _scale(first, second, first_min, second_min, d, d_min,
                                           GROUP + 1, SCALES, SCALE_CENTER, MINS)  # fmt: skip
    if PLACE:
        scale *= 1.0 / (1 << PLACE)
        next_scale *= 1.0 / (1 << PLACE)
    a = _numbers(even, high, AT, PLACE, LOW, HIGH, CENTER, NUMBERS) * scale[:, None]
    b = _numbers(odd, high >> 16, AT, PLACE, LOW, HIGH, CENTER, NUMBERS) * next_scale[:, None]
    if MINS:
        a -= smallest[:, None]
        b -= next_smallest[:, None]
    return tl.join(a, b)


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    first, second, first_min, second_min, d, d_min, GROUP: tl.constexpr, SCALES: tl.constexpr,
    SCALE_CENTER: tl.constexpr, MINS: tl.constexpr,
):  # fmt: skip
    """The scale and the min of a group: [lanes] each."""
    if SCALES == "float16" or SCALES == "bfloat16":
        word = (second if GROUP >= 2 else first) >> GROUP % 2 * 16
        scale = float16_of(word) if SCALES == "float16" else _float(word << 16)
        smallest = scale
        if MINS:
            smallest = float16_of((second_min if GROUP >= 2 else first_min) >> GROUP % 2 * 16)
    else:
        word = (second if GROUP >= 4 else first) >> GROUP % 4 * 8
        scale = (_added(word, 15 if SCALES == "nibbles" else 255) - (8388608 + SCALE_CENTER)) * d
        smallest = scale
        if SCALES == "nibbles":
            smallest = (_added(word >> 4, 15) - 8388608) * d_min
        elif MINS:
            word = (second_min if GROUP >= 4 else first_min) >> GROUP % 4 * 8
            smallest = (_added(word, 255) - 8388608) * d_min
    return scale, smallest


@triton.jit
def _float(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _added(bits, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^23 plus the bits of a mask."""
    return _float(_joined(bits, MASK, MAGIC))


@triton.jit
def _joined(bits, MASK: tl.constexpr, others):  # type: ignore[no-untyped-def]
    """The bits of a mask, and other bits, in one operation, which the compiler would not find."""
    if INTERPRETED:
        return (bits & MASK) | others
    return tl.inline_asm_elementwise(AND_OR, "=r,r,r,r", [bits, MASK, others],
                                     dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def _numbers(  # type: ignore[no-untyped-def]
    low, high, AT: tl.constexpr, PLACE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CENTER: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """The codes at a bit of words [lanes, 4] as numbers, times two to the power of their place."""
    if NUMBERS == "fp4":  # twice e2m1: its bits in float32's places, times 2^127
        bits = ((low << 28 - AT) & -0x80000000) | ((low << 22 - AT) & 0x01C00000)
        return _float(bits) * 2.0**127
    if AT >= 16:  # bytes
        low = low >> 16
    BYTES: tl.constexpr = LOW == 8 or NUMBERS == "iq4"  # noqa: N806
    BITS: tl.constexpr = 8 if BYTES else LOW  # noqa: N806
    bits = _joined(low, ((1 << BITS) - 1) << PLACE, MAGIC)
    if HIGH:
        bits = _joined(high << LOW, ((1 << HIGH) - 1) << LOW + PLACE, bits)
    return _float(bits) - (8388608 + (CENTER << PLACE))


@triton.jit
def look_up(words):  # type: ignore[no-untyped-def]
    """IQ4's values plus 128 of the four lower codes of words, as the bytes of words."""
    if INTERPRETED:
        return (
            _value_of(words & 15) | (_value_of(words >> 4 & 15) << 8)
            | (_value_of(words >> 8 & 15) << 16) | (_value_of(words >> 12 & 15) << 24)
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        LOOK_UP, "=r,r,r,r,r,r", [words, IQ4_0, IQ4_1, IQ4_2, IQ4_3], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _value_of(code):  # type: ignore[no-untyped-def]
    """IQ4's value of a code, plus 128."""
    below = tl.where((code & 4) != 0, IQ4_1, IQ4_0)
    above = tl.where((code & 4) != 0, IQ4_3, IQ4_2)
    word = tl.where((code & 8) != 0, above, below)
    return (word >> (code & 3) * 8) & 0xFF
