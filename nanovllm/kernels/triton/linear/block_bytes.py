"""The codes of `BlockPlanes` as bytes for integer dot products, inside other kernels.

Lane 4 * n + q has the output n, and the inputs `16 * s + 8 * j + 2 * q + h` of a run. The four of
a step s become a word, in the order of w = 2 * j + h.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.common import INTERPRETED
from nanovllm.kernels.triton.linear.block_values import look_up


@triton.jit
def _bytes_of(a, b, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word of four bytes of a and b, whose numbers are the digits of ORDER, the lowest first."""
    if INTERPRETED:
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            AT: tl.constexpr = ORDER >> 4 * i & 7  # noqa: N806
            word |= ((b if AT >= 4 else a) >> 8 * (AT % 4) & 255) << 8 * i
        return word
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, ORDER], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _transposed(a, b, c, d):  # type: ignore[no-untyped-def]
    """Words of the lowest bytes of four words, of their second bytes, and so on."""
    ab, more_ab = _bytes_of(a, b, 0x5140), _bytes_of(a, b, 0x7362)
    cd, more_cd = _bytes_of(c, d, 0x5140), _bytes_of(c, d, 0x7362)
    return (
        _bytes_of(ab, cd, 0x5410), _bytes_of(ab, cd, 0x7632),
        _bytes_of(more_ab, more_cd, 0x5410), _bytes_of(more_ab, more_cd, 0x7632),
    )  # fmt: skip


@triton.jit
def load_four(ptr, at):  # type: ignore[no-untyped-def]
    """Four neighbouring words of each lane."""
    words = tl.load(ptr + at[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.reshape(words, (at.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _shifted(word, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The word, shifted to the right, or to the left if BY is negative."""
    return word >> BY if BY >= 0 else word << -BY


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    low, high, W: tl.constexpr, P: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """The codes w of a pair of steps as bytes: those whose bits are in every second nibble."""
    AT: tl.constexpr = LOW * W % 4 + 4 * P  # noqa: N806
    codes = low >> AT & ((1 << LOW) - 1) * 0x01010101
    if HIGH:
        BY: tl.constexpr = HIGH * W % 4 + 4 * P - LOW  # noqa: N806
        codes |= _shifted(high, BY) & (((1 << HIGH) - 1) << LOW) * 0x01010101
    return codes


@triton.jit
def load_codes(low_ptr, high_ptr, at, q, LOW: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A lane's words of the planes for a run, eight of them at most."""
    slot = at * 4 + q
    if LOW == 8:
        words = load_four(low_ptr, at * 32 + q * 4) + load_four(low_ptr, at * 32 + q * 4 + 16)
    elif LOW == 4:
        words = load_four(low_ptr, slot * 4)
    else:
        a, c = tl.load(low_ptr + slot * 2), tl.load(low_ptr + slot * 2 + 1)
        words = a, a, c, c
    if HIGH == 1:
        more = tl.load(high_ptr + slot)
        words += more, more
    if HIGH == 2:
        words += tl.load(high_ptr + slot * 2), tl.load(high_ptr + slot * 2 + 1)
    return words


@triton.jit
def codes_by_step(words, LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of a run as bytes: a word for each of its eight steps."""
    if LOW == 8 or NUMBERS == "iq4":
        if LOW == 8:
            s0, s2, s4, s6 = _transposed(words[0], words[1], words[2], words[3])
            s1, s3, s5, s7 = _transposed(words[4], words[5], words[6], words[7])
        else:
            s0, s2, s4, s6 = _transposed(
                look_up(words[0]), look_up(words[1]), look_up(words[2]), look_up(words[3])
            )
            s1, s3, s5, s7 = _transposed(
                look_up(words[0] >> 16), look_up(words[1] >> 16),
                look_up(words[2] >> 16), look_up(words[3] >> 16),
            )  # fmt: skip
    else:
        E: tl.constexpr = 4 if HIGH else 0  # noqa: N806
        F: tl.constexpr = 5 if HIGH else 0  # noqa: N806
        a, b, c, d, e, f = words[0], words[1], words[2], words[3], words[E], words[F]
        s0, s4, s1, s5 = _transposed(
            _codes(a, e, 0, 0, LOW, HIGH), _codes(b, e, 1, 0, LOW, HIGH),
            _codes(c, f, 2, 0, LOW, HIGH), _codes(d, f, 3, 0, LOW, HIGH),
        )  # fmt: skip
        s2, s6, s3, s7 = _transposed(
            _codes(a, e, 0, 1, LOW, HIGH), _codes(b, e, 1, 1, LOW, HIGH),
            _codes(c, f, 2, 1, LOW, HIGH), _codes(d, f, 3, 1, LOW, HIGH),
        )  # fmt: skip
    return s0, s1, s2, s3, s4, s5, s6, s7
