"""The queries of a decode step's sequences: where they are, and what each of them sees.

A sequence has ROWS rows, at consecutive positions. The keys that they see are in `lens`: one more
for each row, and 0 for rows that are not used, which are the last ones of a sequence or all. A
program takes Q of the rows, with G heads each: query g is of row g // G.
"""

import triton
import triton.language as tl

# The largest score of a query that has seen no key: finite, so that a tile without keys for it adds
# nothing.
NONE = tl.constexpr(-1e30)


@triton.jit
def longest(lens_ptr, sequence, inside, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys that the rows of a sequence see, or of several sequences; 0 where not `inside`."""
    length = tl.load(lens_ptr + sequence * ROWS, mask=inside, other=0)
    for row in tl.static_range(1, ROWS):
        other = tl.load(lens_ptr + sequence * ROWS + row, mask=inside, other=0)
        length = tl.maximum(length, other)
    return length


@triton.jit
def lengths(  # type: ignore[no-untyped-def]
    lens_ptr, sequence, length, g,
    ROWS: tl.constexpr, FIRST: tl.constexpr, Q: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The keys that each query g sees, where the first is of the row FIRST, and those that all see.

    A sequence of one row has its `length`, a number.
    """
    lens, shortest = length, length
    if ROWS > 1:
        lens = tl.load(lens_ptr + sequence * ROWS + FIRST + g // G, mask=g < Q * G, other=0)
        shortest = tl.load(lens_ptr + sequence * ROWS)
    return lens, shortest


@triton.jit
def out_heads(  # type: ignore[no-untyped-def]
    g, first, num_kv_heads, Q: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Where the queries g are among the heads of all rows; the first one is at `first`.

    G of them are together; between two rows' are the queries of the other key heads.
    """
    at = first + g
    if Q > 1:
        at += g // G * ((num_kv_heads - 1) * G)
    return at


@triton.jit
def sees(lens, keys, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether queries that see `lens` keys see these keys."""
    seen = keys < lens
    if WINDOW:
        seen &= keys >= lens - WINDOW
    return seen
