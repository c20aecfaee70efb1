"""Merge the parts of a divided row to its output. Shapes are those of `decode_attention`."""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.queries import out_heads


@triton.jit
def merge_if_last(  # type: ignore[no-untyped-def]
    arrivals_ptr, lse_ptr, partial_ptr, out_ptr, out_row, row_begin, row_end, share,
    kv_head, num_kv_heads, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, MERGED: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Count a part of a row as written; the program of the last part merges all, MERGED at a time.

    The barrier orders all threads' writes before the release; the acquire orders the reads after
    it. The counter is reset to 0 for the next layer.
    """
    first_program = row_begin // share
    last_program = (row_end - 1) // share
    arrivals_at = arrivals_ptr + first_program * num_kv_heads + kv_head
    tl.debug_barrier()
    if tl.atomic_add(arrivals_at, 1, sem="acq_rel") == last_program - first_program:
        BLOCK_G: tl.constexpr = triton.next_power_of_2(Q * G)  # noqa: N806
        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, BLOCK_D)
        top = tl.full([BLOCK_G], -1e30, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in tl.range(first_program, last_program + 1, MERGED, loop_unroll_factor=UNROLLED):
            program = start + tl.arange(0, MERGED)
            second = (program == first_program) & (row_begin != first_program * share)
            slot = (program * num_kv_heads + kv_head) * 2 + second.to(tl.int32)
            at = slot[:, None] * (Q * G) + g[None, :]
            real = (program <= last_program)[:, None] & (g < Q * G)[None, :]
            lse = tl.load(lse_ptr + at, mask=real, other=-float("inf"), cache_modifier=".cg")
            partial = tl.load(
                partial_ptr + at[:, :, None] * D + d[None, None, :],
                mask=real[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            weights = tl.exp2(lse - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, axis=0)
            acc = acc * shrink[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
            top = new_top
        total = tl.where(total == 0.0, 1.0, total)  # padding heads
        heads = out_heads(g, out_row, num_kv_heads, Q, G)
        out_at = out_ptr + heads[:, None] * D + d[None, :]
        inside = (g < Q * G)[:, None] & (d < D)[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(arrivals_at, 0)
