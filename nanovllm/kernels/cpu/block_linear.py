"""Linear layers and embeddings with weights in GGUF's blocks, multiplied as they are stored.

T rows, K inputs, N outputs. Each output depends only on its own row: it is the same, bit for bit,
for any number of rows and threads. bfloat16 outputs are rounded once.

- float32: weights are decoded to float32. Products are added in parts of 256 inputs.
- bfloat16: inputs are rounded to integers of 12 to 14 bits for each 32 inputs (block_rounded.h),
  which is below their own error. Products of integers are exact. Those of 32 inputs are multiplied
  by the scales, and added in float32 in the order of the inputs.
"""

import ctypes
from dataclasses import dataclass, field

import torch

from nanovllm.kernels.cpu import huge_pages
from nanovllm.kernels.cpu.library import DTYPES, address, constant, function
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.operands.block_types import BLOCK_TYPES, BlockType

KINDS = tuple(BLOCK_TYPES)  # as `with_kind` of block_kinds.h numbers them


class BlocksStruct(ctypes.Structure):
    """`Blocks` of block_kinds.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "kind")),
    )


@dataclass(frozen=True, slots=True)
class TiledBlocks:
    """A weight [N, K] in tiles of 16 outputs, as block_kinds.h describes them."""

    codes: torch.Tensor  # uint8 [tiles, bytes]
    scales: torch.Tensor  # uint8 [tiles, bytes]
    kind: BlockType
    shape: tuple[int, int]  # N, K
    # The addresses that the kernel reads; the tensors' memory must not move.
    struct: BlocksStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        struct = BlocksStruct(
            self.codes.data_ptr(), self.scales.data_ptr(), *self.shape, KINDS.index(self.kind.name)
        )
        object.__setattr__(self, "struct", struct)


def arrange_blocks(weight: BlockMatrix) -> TiledBlocks:
    """Copy a weight into tiles: up to 1.04 times its bytes, if N is a multiple of 16."""
    (size_out, size_in), kind = weight.shape, weight.kind
    num_tiles = -(-size_out // constant("outputs_of_tile"))
    codes, scales = _tile_bytes(kind, size_in)
    empty = [huge_pages.empty((num_tiles, size), torch.uint8) for size in (codes, scales)]
    tiled = TiledBlocks(empty[0].zero_(), empty[1].zero_(), kind, weight.shape)
    assert weight.codes.is_contiguous()
    function("arrange_blocks")(
        ctypes.addressof(tiled.struct), weight.codes.data_ptr(), kind.num_bytes,
        torch.get_num_threads(),
    )  # fmt: skip
    return tiled


def _tile_bytes(kind: BlockType, size_in: int) -> tuple[int, int]:
    """The bytes of a tile's codes and scales."""
    sizes = (ctypes.c_int64 * 2)()
    function("tile_bytes")(KINDS.index(kind.name), size_in, ctypes.addressof(sizes))
    return sizes[0], sizes[1]


def block_linear(
    x: torch.Tensor, weight: TiledBlocks, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` [T, N] of x [T, K]."""
    num_rows, size_in = x.shape
    assert size_in == weight.shape[1] and x.stride(1) == 1 and x.dtype in DTYPES
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    out = x.new_empty(num_rows, weight.shape[0])
    function("block_linear", x.dtype)(
        ctypes.addressof(weight.struct), x.data_ptr(), x.stride(0), address(bias), out.data_ptr(),
        num_rows, torch.get_num_threads(),
    )  # fmt: skip
    return out


def block_rows(weight: TiledBlocks, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight's rows with these ids [T], as [T, K] of a float type."""
    ids = ids.long().contiguous()
    out = torch.empty(len(ids), weight.shape[1], dtype=dtype)
    function("weights_of_rows", dtype)(
        ctypes.addressof(weight.struct), ids.data_ptr(), len(ids), out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out
