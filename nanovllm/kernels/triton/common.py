"""Functions that the Triton kernels share. N keys of a tile, D head dimension."""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.kv_layer import KVLayer

MEASURED = 90  # the compute capability on which early launches and copied tiles were measured
GLUON = ("3.6.", "3.7.")  # the versions of Triton that compile our kernels in Gluon
LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E), and the hardware has only exp2
CONVERTS_CODES = 89  # the compute capability from which GPUs convert e4m3
ROOM = 128  # rows of the largest tile of a matrix product
TILE = 64  # the most keys of a tile
TILE_BYTES = 1 << 14  # of a tile's K, and of its V: shared memory has room for two or three tiles


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors: programs that run at the same time with one on each."""
    if device.type != "cuda":
        return 4  # for the interpreter, so that it divides work in the same way
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _nothing():  # type: ignore[no-untyped-def]
    pass


# Under TRITON_INTERPRET=1, kernels are Python over CPU tensors.
INTERPRETED = tl.constexpr(not isinstance(_nothing, triton.JITFunction))


def can_copy_tiles(device: torch.device) -> bool:
    """Whether kernels on the device copy tiles of matrices by Hopper's tensor memory accelerator.

    The host needs longer to launch such kernels, because each launch describes the matrices.
    """
    return bool(INTERPRETED) or capability(device) == MEASURED


def can_overlap(device: torch.device) -> bool:
    """Whether kernels in Gluon run on the device: on Hopper GPUs, with the versions in GLUON.

    Gluon is experimental, and may change with any version of Triton.
    """
    known = triton.__version__.startswith(GLUON)
    return known and not INTERPRETED and capability(device) == MEASURED


def tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix to the tensor memory accelerator: its address, and the size of its tiles.

    Rows must be contiguous and begin at multiples of 16 bytes.
    """
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def rows_with_room(
    num_rows: int, size: int, like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Allocate rows for matrix products to read, with memory after them for whole tiles of ROOM."""
    whole = like.new_empty(cdiv(num_rows, ROOM) * ROOM, size, dtype=dtype or like.dtype)
    return whole[:num_rows]


def with_room(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Extend x by the rows after it in memory that complete its last tile, if they exist.

    Tiles that extend beyond the end of a matrix take up to twice as long.
    """
    assert x.is_contiguous()
    size = x.shape[1]
    there = (x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()) // size
    return x.as_strided([min(there, cdiv(len(x), rows) * rows), size], [size, 1])


@functools.cache
def capability(device: torch.device) -> int:
    """A GPU's compute capability, 90 for 9.0; 0 for other devices."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def converts_codes(device: torch.device) -> bool:
    """Whether kernels on the device convert codes by the GPU's own instruction."""
    return capability(device) >= CONVERTS_CODES


def shared_bytes(device: torch.device) -> int:
    """The bytes of shared memory that a program can use for tiles."""
    at = capability(device)
    return (210 << 10) if at in (90, 100, 103) else (144 << 10) if at in (80, 87) else 88 << 10


def early(device: torch.device) -> dict[str, bool]:
    """Options that let a kernel start while the kernel before it ends.

    Every program of such a kernel calls `await_inputs` before it writes, and before it reads data
    from the previous kernel. This waits for the end of the previous kernel, which itself waited for
    the kernel before it (or was launched without these options, after the end of all earlier
    kernels). Then all earlier writes are visible.

    Data that older kernels wrote, such as weights, may be read earlier: a kernel calls
    `let_next_begin` after `await_inputs`, so the kernels before the previous one have ended.
    """
    can = not INTERPRETED and capability(device) == MEASURED
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the end of the kernel before this one."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start when all programs of this kernel have called this function.

    The best place for the call was measured: for a linear layer of more than two rows, the end.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b, acc=None):  # type: ignore[no-untyped-def]
    """`a @ b`, or `acc + a @ b`, with float32 precision inside.

    The interpreter needs float32 inputs.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def leave_parts(  # type: ignore[no-untyped-def]
    acc, up, parts_ptr, arrivals_ptr, tile, split, size, at, real,
    SPLIT: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Store this program's part of a tile that SPLIT programs share; return whether it is the last.

    If TWO is not 0, a part has two tiles, acc and up. `at` are the places of a tile's elements in a
    matrix of `size` elements.
    """
    if SPLIT == 1:
        return True
    TENSORS: tl.constexpr = 2 if TWO else 1  # noqa: N806
    parts_at = parts_ptr + split * TENSORS * size + at
    tl.store(parts_at, acc.to(tl.float32), mask=real)
    if TWO:
        tl.store(parts_at + size, up.to(tl.float32), mask=real)
    # The barrier orders all threads' writes before the release; the acquire orders the reads after
    # it.
    tl.debug_barrier()
    return tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT - 1


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    acc, up, parts_ptr, arrivals_ptr, tile, size, at, real,
    SPLIT: tl.constexpr, TWO: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """For the last program: the sums of all parts, added in order whichever program is the last.

    UNROLLED reads all parts at once; large tiles do not have enough registers for this.
    """
    acc, up = acc.to(tl.float32), up.to(tl.float32)
    if SPLIT > 1:
        tl.store(arrivals_ptr + tile, 0)  # reset for the next call
        acc = tl.zeros_like(acc)
        up = acc
        TENSORS: tl.constexpr = 2 if TWO else 1  # noqa: N806
        for part in tl.range(0, SPLIT, loop_unroll_factor=SPLIT if UNROLLED else 1):
            parts_at = parts_ptr + part * TENSORS * size + at
            acc += tl.load(parts_at, mask=real, other=0.0, cache_modifier=".cg")
            if TWO:
                up += tl.load(parts_at + size, mask=real, other=0.0, cache_modifier=".cg")
    return acc, up


def tile_keys(block_d: int, dtype: torch.dtype) -> int:
    """The number of keys of a tile with rows of `block_d` elements: a power of two that divides
    TILE.

    `dtype` is the type of queries; codes are converted to it before the product.
    """
    return max(16, min(TILE, TILE_BYTES // (block_d * dtype.itemsize)))


def cap_log2(kv: KVLayer) -> float:
    """The soft cap on scores, which include the factor log2(e); 0 without a cap."""
    return 0.0 if kv.soft_cap is None else kv.soft_cap * LOG2E


@triton.jit
def cache_offsets(  # type: ignore[no-untyped-def]
    table_ptr, first_key, end, kv_head, num_kv_heads,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Offsets of the keys `first_key + [0, BLOCK_N)` of one head in the paged cache, in 64 bits.

    Returns the offsets of their first elements and of their scales. `first_key` is a multiple of
    BLOCK_N, so a tile is in one block if BLOCK_N divides the block's size.
    """
    key = first_key + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * num_kv_heads + kv_head) * D
    return at, (block * num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q, k, v, visible, scale_log2, top, total, acc, MASKED: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """One tile of online softmax: fold keys k [N, D], values v [N, D] into (top, total, acc).

    CAP is the soft cap on the scores, times log2(e); 0: no cap.
    """
    scores = dot(q, tl.trans(k)) * scale_log2
    if CAP > 0:
        shrunk = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / CAP))  # 2 * log2(e)
        capped = CAP * ((1 - shrunk) / (1 + shrunk))
        scores = tl.where(scores < 0, -capped, capped)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
    return new_top, total, acc
