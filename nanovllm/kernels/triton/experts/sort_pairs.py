"""Sorting the pairs of few tokens by expert, as the last work of a router's kernel."""

import triton
import triton.language as tl


@triton.jit
def sort_pairs(  # type: ignore[no-untyped-def]
    ids_ptr, slots_ptr, counts_ptr, order_ptr, bounds_ptr, tile_ends_ptr, num_pairs,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort all pairs by expert, from the experts' counts and each pair's number in its expert."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + e, mask=e < E, other=0, cache_modifier=".cg")
    ends = tl.cumsum(counts, axis=0)
    tl.store(bounds_ptr + e, ends - counts, mask=e < E)
    tl.store(bounds_ptr + E, num_pairs)
    tile_ends = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)
    tl.store(tile_ends_ptr + e, tile_ends, mask=e < E)
    tl.debug_barrier()  # all threads have read the counts, and see the bounds
    tl.store(counts_ptr + e, 0, mask=e < E)  # reset for the next call
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < num_pairs
        expert = tl.load(ids_ptr + pair, mask=inside, other=0, cache_modifier=".cg")
        slot = tl.load(slots_ptr + pair, mask=inside, other=0, cache_modifier=".cg")
        first = tl.load(bounds_ptr + expert, mask=inside, other=0)
        tl.store(order_ptr + first + slot, pair, mask=inside)


@triton.jit
def sort_pairs_of_one(  # type: ignore[no-untyped-def]
    ids, order_ptr, bounds_ptr, tile_ends_ptr, E: tl.constexpr, K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of one token, from its experts' ids [BLOCK_K].

    Some are equal if the token's row is not finite.
    """
    k = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_E)
    ids = tl.where(k < K, ids, E)
    is_before = (ids[None, :] < ids[:, None]) | (
        (ids[None, :] == ids[:, None]) & (k[None, :] < k[:, None])
    )
    tl.store(order_ptr + tl.sum(is_before.to(tl.int32), axis=1), k, mask=k < K)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), axis=0)
    ends = tl.cumsum(counts, axis=0)
    tl.store(bounds_ptr + e, ends - counts, mask=e < E)
    tl.store(bounds_ptr + E, K)
    tiles = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)
    tl.store(tile_ends_ptr + e, tiles, mask=e < E)
