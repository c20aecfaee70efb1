"""The tiles of `hopper_prefill`, and the warp that copies them to shared memory.

T query tokens, S sequences, KVH key heads, G query heads for a key head, D head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # rows of scores of a warpgroup
KEYS = gl.constexpr(128)  # keys of a tile
PART = gl.constexpr(64)  # keys of a tile that are in one block; columns that are copied at once
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in shared memory
MATRIX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # how the accelerator lays tiles out


@gluon.jit
def tile_of(number, steps, num_kv_heads, BLOCK_Q: gl.constexpr):  # type: ignore[no-untyped-def]
    """The tile with this number, and its sequence."""
    cu_q_ptr, cu_k_ptr, tile_seqs_ptr, tile_ends_ptr = steps
    tile = number // num_kv_heads
    seq = gl.load(tile_seqs_ptr + tile)
    # Tiles are counted from a sequence's end, so that those with the most keys start first.
    query = (gl.load(tile_ends_ptr + seq) - 1 - tile) * BLOCK_Q
    row = gl.load(cu_q_ptr + seq)
    num_queries = gl.load(cu_q_ptr + seq + 1) - row
    num_keys = gl.load(cu_k_ptr + seq + 1) - gl.load(cu_k_ptr + seq)
    position = num_keys - num_queries + query
    num_tiles = gl.cdiv(gl.minimum(position + BLOCK_Q, num_keys), KEYS)
    return seq, number % num_kv_heads, row, query, num_queries, num_keys, position, num_tiles


@gluon.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    tiles, memory, full, empty, count, row, other_row, column,
    D: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Copy a tile of keys, or of values, as soon as its stage is empty; `full` reports its end.

    PAGED: copy PART keys from `row`, and PART keys from `other_row`.
    """
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, KEYS * D * 2)
    if PAGED:
        # In memory, the first PART columns of all keys come first.
        parts: gl.constexpr = KEYS // PART * (D // PART)
        memory = memory._reinterpret(memory.dtype, [STAGES * parts, PART, PART], MATRIX)
        for part in gl.static_range(parts):
            at = [other_row if part % 2 else row, column + part // 2 * PART]
            tma.async_copy_global_to_shared(tiles, at, bar, memory.index(stage * parts + part))
    else:
        tma.async_copy_global_to_shared(tiles, [row, column], bar, memory.index(stage))


@gluon.jit
def copy(  # type: ignore[no-untyped-def]
    inputs, G: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The warp that copies. BLOCK_SIZE 0: K and V are the step's own, one row for each token."""
    tiles, memory, full, empty, steps, tables_ptr, table_stride, total, num_kv_heads = inputs
    q_tiles, k_tiles, v_tiles = tiles
    q_memory, k_memory, v_memory = memory
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    other_heads: gl.constexpr = BLOCK_Q * HEADS == ROWS  # the other warpgroup has other heads
    count = 0
    done = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        seq, kv_head, first_row, query, _, num_keys, _, num_tiles = tile_of(
            number, steps, num_kv_heads, BLOCK_Q
        )
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), done ^ 1)
            mbarrier.expect(q_full.index(w), ROWS * D * 2)
            row = first_row + query + (0 if other_heads else w * ROWS // HEADS)
            head = kv_head * G + (w * HEADS if other_heads else 0)
            tma.async_copy_global_to_shared(
                q_tiles, [row, head, 0], q_full.index(w), q_memory.index(w)
            )
        done ^= 1
        table = tables_ptr + seq.to(gl.int64) * table_stride
        last = (num_keys - 1) // PART * PART
        for i in range(num_tiles):
            row = first_row + i * KEYS
            other_row = row
            if BLOCK_SIZE:
                key = i * KEYS
                other = gl.minimum(key + PART, last)  # for a part without keys, any keys
                row = gl.load(table + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
                other_row = gl.load(table + other // BLOCK_SIZE) * BLOCK_SIZE + other % BLOCK_SIZE
            at = (row, other_row, kv_head * D)
            _copy_tile(k_tiles, k_memory, k_full, k_empty, count, *at, D, BLOCK_SIZE > 0)
            _copy_tile(v_tiles, v_memory, v_full, v_empty, count, *at, D, BLOCK_SIZE > 0)
            count += 1
