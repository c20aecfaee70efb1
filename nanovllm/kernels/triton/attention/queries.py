"""Find the queries of a decode step's sequences, and the keys that each of them sees.

A sequence has ROWS rows, at consecutive positions. `lens` has the number of keys that each row
sees: one more for each next row, and 0 for unused rows, which are the last ones of a sequence or
all. A program computes Q of the rows, with G heads each: query g belongs to row g // G.
"""

import triton
import triton.language as tl

# The largest score of a query before its first key. It is finite, so that a tile without keys for
# the query adds nothing.
NONE = tl.constexpr(-1e30)


@triton.jit
def longest(lens_ptr, sequence, inside, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The most keys that a row of the sequence sees, or of each sequence; 0 if not `inside`."""
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
    """The keys that each query g sees, from the row FIRST on, and the keys that all of them see.

    For a sequence of one row, both are its `length`, a number.
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
    """The places of the queries g among the heads of all rows; the first one is at `first`.

    G queries are together; between those of two rows are the queries of the other key heads.
    """
    at = first + g
    if Q > 1:
        at += g // G * ((num_kv_heads - 1) * G)
    return at


@triton.jit
def load_sinks(sinks_ptr, head, real):  # type: ignore[no-untyped-def]
    """The sinks of heads, with the factor log2(e) that scores have.

    A sum of weights that begins with the sink as its largest score, and with 1 as total, has it.
    """
    return tl.load(sinks_ptr + head, mask=real, other=0.0) * 1.4426950408889634


@triton.jit
def surplus_row(  # type: ignore[no-untyped-def]
    number, cu_q_ptr, tile_ends_ptr, num_seqs, QUERIES: tl.constexpr
):  # fmt: skip
    """The first of the rows of a surplus tile of a prefill: they follow the last sequence's."""
    return tl.load(cu_q_ptr + num_seqs) + QUERIES * (number - tl.load(tile_ends_ptr + num_seqs - 1))


@triton.jit
def sees(lens, keys, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether queries that see `lens` keys see the keys `keys`."""
    seen = keys < lens
    if WINDOW:
        seen &= keys >= lens - WINDOW
    return seen
