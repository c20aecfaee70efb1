"""The values of a tile of an `MxStack`, inside other kernels.

A thread loads the codes that it will multiply in a tensor core, as for `BlockPlanes`: lane
4 * r + q of a warp has the outputs r and r + 8 of 16. So values stay in the registers in which they
are computed. All of this is exact.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED

# Word $8 becomes the numbers of its codes, c by c, those of both halves at a time. $9 has the scale
# twice. Adding -0 keeps the sign of zero.
_BODY = """{ .reg .b32 t, u, z, w;
    mov.b32 z, 0x80008000; mov.b32 w, 0x7e807e80;
    shl.b32 t, $8, 6; and.b32 t, t, 0x81c081c0; SCALE mov.b32 {$0, $1}, t;
    shl.b32 t, $8, 2; and.b32 t, t, 0x81c081c0; SCALE mov.b32 {$2, $3}, t;
    shf.r.wrap.b32 t, $8, $8, 4; and.b32 t, t, 0x81c081c0; SCALE mov.b32 {$4, $5}, t;
    and.b32 t, $8, 0x81808180; shr.b32 u, $8, 8;
    lop3.b32 t, u, 0x00400040, t, 0xea; SCALE mov.b32 {$6, $7}, t; }"""
_ONCE = "fma.rn.bf16x2 t, t, $9, z;"
NARROW = tl.constexpr(_BODY.replace("SCALE", _ONCE))
WIDE = tl.constexpr(_BODY.replace("SCALE", f"fma.rn.bf16x2 t, t, w, z; {_ONCE}"))  # w: 2^126


@triton.jit
def load_mx_values(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, n, other_n, run, like, OUTPUTS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """The weights [outputs, 128] of a run of inputs, of the type of `like`.

    n and other_n are the upper and the lower output of each lane, of OUTPUTS.
    """
    held = load_mx_words(codes_ptr, scales_ptr, n, other_n, run, None, OUTPUTS)
    return mx_values(held, like, IS_WIDE)


@triton.jit
def load_mx_words(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, n, other_n, run, exists, OUTPUTS: tl.constexpr
):  # fmt: skip
    """What `mx_values` needs for the weights of a run; zeros if it does not exist."""
    upper, upper_scales = _words_of(codes_ptr, scales_ptr, run * OUTPUTS + n, exists)
    lower, lower_scales = _words_of(codes_ptr, scales_ptr, run * OUTPUTS + other_n, exists)
    return upper, upper_scales, lower, lower_scales


@triton.jit
def hold_mx_words(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, n, other_n, first, end, OUTPUTS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """A tuple of what `load_mx_words` loads for COUNT runs from `first` on; none exist from `end`.

    All loads are in flight at the same time.
    """
    held = ()
    for i in tl.static_range(COUNT):
        run = first + i
        held += (  # type: ignore[assignment]
            load_mx_words(codes_ptr, scales_ptr, n, other_n, run, run < end, OUTPUTS),
        )
    return held


@triton.jit
def _words_of(codes_ptr, scales_ptr, row, exists):  # type: ignore[no-untyped-def]
    """The words [lanes, 4] of one output of each lane, and its scales [lanes]."""
    g = tl.arange(0, 4)
    slot = row * 4 + tl.arange(0, row.shape[0]) % 4
    at = codes_ptr + slot[:, None] * 4 + g[None, :]
    if exists is None:
        words, scales = tl.load(at), tl.load(scales_ptr + row)
    else:
        words = tl.load(at, mask=exists, other=0)
        scales = tl.load(scales_ptr + row, mask=exists, other=0)
    return words, scales


@triton.jit
def mx_values(held, like, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights [outputs, 128] of loaded words, of the type of `like`."""
    upper, upper_scales, lower, lower_scales = held
    TILES: tl.constexpr = upper.shape[0] // 32  # noqa: N806
    upper = _of_lanes(upper, upper_scales, like, IS_WIDE)
    lower = _of_lanes(lower, lower_scales, like, IS_WIDE)
    # Tile, r, q, g, h, the two bits of c, upper or lower.
    values = tl.reshape(tl.join(upper, lower), (TILES, 8, 4, 4, 2, 2, 2, 2))
    values = tl.permute(values, (0, 7, 1, 3, 6, 5, 2, 4))
    return tl.reshape(values, (16 * TILES, 128))


@triton.jit
def _of_lanes(words, scales, like, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of one output of each lane: [lanes, 4, 2, 2, 2], by g, h and the bits of c."""
    g = tl.arange(0, 4)
    exponents = (scales[:, None] >> (g * 8)[None, :]) & 255
    if INTERPRETED or like.dtype != tl.bfloat16:
        scale = _power(exponents, IS_WIDE)
        turned = (words << 16) | ((words >> 16) & 0xFFFF)  # each half has signs of the other
        a, b = _number(words, scale, 0, IS_WIDE), _number(turned, scale, 0, IS_WIDE)
        c, d = _number(words, scale, 1, IS_WIDE), _number(turned, scale, 1, IS_WIDE)
        e, f = _number(words, scale, 2, IS_WIDE), _number(turned, scale, 2, IS_WIDE)
        i, j = _number(words, scale, 3, IS_WIDE), _number(turned, scale, 3, IS_WIDE)
    else:
        if IS_WIDE:  # the smallest power is less than all normal numbers
            scale = tl.where(exponents == 0, 0x00400040, exponents * 0x00800080)
        else:
            scale = exponents * 0x00800080
        a, b, c, d, e, f, i, j = tl.inline_asm_elementwise(
            WIDE if IS_WIDE else NARROW, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    values = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(i, j)))
    return values.to(like.dtype)


@triton.jit
def _power(exponents, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two with this exponent in float32."""
    bits = exponents << 23
    if IS_WIDE:
        bits = tl.where(exponents == 0, 1 << 22, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _number(word, scale, C: tl.constexpr, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of the code c in the lower half of a word, in float32."""
    if C == 0:
        bits = word << 6
    elif C == 1:
        bits = word << 2
    elif C == 2:
        bits = word >> 4
    else:
        bits = (word & 0x8180) | ((word >> 8) & 0x0040)
    bits = ((bits & 0x8000) << 16) | ((bits & 0x01C0) << 16)
    number = bits.to(tl.float32, bitcast=True)
    if IS_WIDE:
        number *= 2.0**126
    return number * scale
