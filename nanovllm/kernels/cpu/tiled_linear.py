"""Linear layers with weights in tiles: plain numbers, or codes of a quantized weight.

T rows, K inputs, N outputs. Arithmetic is in float32: inputs are never rounded, even if a quantized
weight allows it, and bfloat16 outputs are rounded once. Plain bfloat16 weights are stored as
pairs.py says, and multiplied by AMX or by vectors of bfloat16, if the processor is fast with them.
"""

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nanovllm.kernels.cpu import huge_pages, pairs, processor
from nanovllm.kernels.cpu.library import DTYPES, address, constant, function
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

if TYPE_CHECKING:
    from nanovllm.kernels.cpu.byte_linear import TiledBytes

# As `Kind` of tiled_linear.h numbers them.
KINDS = ("int8", "int4", "e4m3", "bfloat16", "float32", "pairs", "rows")
OF_PAIRS = ("pairs", "rows")
PLAIN = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class MatrixStruct(ctypes.Structure):
    """`Matrix` of tiled_linear.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "order")),
        *((name, ctypes.c_int64)
          for name in ("outputs", "depth", "blocks", "blocks_of_group", "kind")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A weight [N, K] in tiles of outputs, as tiled_linear.h reads it.

    Each group's inputs are padded with zeros to whole blocks; together these are P inputs.
    """

    codes: torch.Tensor  # bytes, one or half of one for each weight; or plain numbers
    scales: torch.Tensor | None  # [tiles, groups, outputs of a tile]
    zeros: torch.Tensor | None  # the same, int8
    order: torch.Tensor | None  # [P], int32: the input at each place, or -1; None: in x's order
    kind: str  # of KINDS
    shape: tuple[int, int]  # N, K
    blocks: int
    depth: int  # inputs of a block
    blocks_of_group: int
    # The addresses that the kernel reads; the tensors' memory must not move.
    struct: MatrixStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        struct = MatrixStruct(
            self.codes.data_ptr(), address(self.scales), address(self.zeros), address(self.order),
            self.shape[0], self.depth, self.blocks, self.blocks_of_group, KINDS.index(self.kind),
        )  # fmt: skip
        object.__setattr__(self, "struct", struct)


def arrange(weight: QuantizedMatrix) -> TiledMatrix:
    """Copy a weight [N, K] into the kernel's layout.

    Peak memory: 4 bytes for each weight, including the copied codes.
    """
    assert weight.codes.dim() == 2, "the matrices of a stack are arranged one by one"
    kind = "e4m3" if weight.codes.dtype == torch.float8_e4m3fn else f"int{weight.bits}"
    group = min(weight.block[1], weight.codes.shape[1])
    scales = _of_outputs(weight.scales.float(), weight)
    codes = weight.codes.view(torch.uint8)
    if kind == "e4m3":
        # The kernel's codes have no NaN: the scale of the group becomes NaN instead.
        scales = scales * constant("e4m3_unit")
        nan = (codes & 0x7F) == 0x7F
        if nan.any():
            outputs, inputs = nan.nonzero(as_tuple=True)
            scales[outputs, inputs // group] = torch.nan
    zeros = None if weight.zeros is None else _tiled(_of_outputs(weight.zeros, weight))
    return _arranged(codes, kind, group, _tiled(scales), zeros, weight.order)


def arrange_plain(
    weight: torch.Tensor,
    is_table: bool = False,
    has_bias: bool = False,  # noqa: ARG001
) -> TiledMatrix | None:
    """Copy a plain weight; None if oneDNN is faster. Peak memory: three times the weight.

    A table's rows, which an embedding needs too, are not copied if AMX multiplies them.
    """
    if weight.dtype not in processor.tiled_types():
        return None
    if weight.dtype == torch.bfloat16 and not constant("unit_size") and processor.onednn_has_amx():
        return None  # our library was made by a compiler that does not know AMX
    return arrange_in_one_order(weight, is_table)


def arrange_in_one_order(
    weight: torch.Tensor,
    is_table: bool = False,
    has_bias: bool = False,  # noqa: ARG001
) -> TiledMatrix | None:
    """The same also where oneDNN is faster, whose order of sums depends on the number of rows.

    None for types that the kernels do not multiply.
    """
    if weight.dtype not in PLAIN:
        return None
    weight = weight.detach()
    if weight.dtype == torch.bfloat16:
        if size := constant("unit_size"):
            if is_table and not weight.shape[1] % size and len(weight) >= size:
                return _in_table(weight)
            return _in_pairs(weight, size)
        vectors = constant("vector_unit_size")
        if vectors and processor.has_fast_vectors(processor.cpu_info()):
            return _in_pairs(weight, vectors)
    return tiled_plain(weight)


def tiled_plain(weight: torch.Tensor) -> TiledMatrix:
    """Copy a plain weight to tiles that are multiplied in float32, on any processor."""
    return _arranged(weight, PLAIN[weight.dtype], weight.shape[1])


def plain_of(weight: "TiledMatrix | TiledBytes") -> torch.Tensor | None:
    """The plain weight [N, K] that `arrange_plain` got; None if it was a quantized one.

    A copy, except of a table, whose own memory it is.
    """
    if not isinstance(weight, TiledMatrix):
        return None
    if weight.kind == "pairs":
        return pairs.of_units(weight.codes, weight.shape)
    if weight.kind == "rows":
        return weight.codes
    if weight.kind not in PLAIN.values():
        return None
    size_out, size_in = weight.shape
    return weight.codes.transpose(1, 2).flatten(0, 1)[:size_out, :size_in].contiguous()


def _in_table(rows: torch.Tensor) -> TiledMatrix:
    """The matrix of a table's rows, in their own memory."""
    assert rows.is_contiguous()
    huge_pages.collapse(rows)
    shape = (rows.shape[0], rows.shape[1])
    return TiledMatrix(rows, None, None, None, "rows", shape, 1, shape[1], 1)


def _in_pairs(weight: torch.Tensor, size: int) -> TiledMatrix:
    """Copy a bfloat16 weight to units of `size` inputs and outputs."""
    size_out, size_in = weight.shape
    padded = _round_up(size_in, size)
    return TiledMatrix(
        codes=pairs.to_units(weight, size),
        scales=None,
        zeros=None,
        order=_places(None, size_in, size_in, padded),
        kind="pairs",
        shape=(size_out, size_in),
        blocks=padded // size,
        depth=size,
        blocks_of_group=padded // size,
    )


def _arranged(
    codes: torch.Tensor,
    kind: str,
    group: int,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> TiledMatrix:
    """Tile codes [N, K] with groups of `group` inputs, each divided into blocks of equal size."""
    size_out, size_in = codes.shape
    depth = min(constant("max_depth"), _round_up(group, constant("step_inputs")))
    padded = _round_up(group, depth)
    return TiledMatrix(
        codes=_tiled_codes(_fill_up(codes, group, padded), kind),
        scales=scales,
        zeros=zeros,
        order=_places(order, size_in, group, padded),
        kind=kind,
        # A matrix may have more columns than inputs: zero columns pad its groups.
        shape=(size_out, size_in if order is None else int(order.max()) + 1),
        blocks=-(-size_in // group) * (padded // depth),
        depth=depth,
        blocks_of_group=padded // depth,
    )


def tiled_linear(
    x: torch.Tensor, weight: "TiledMatrix | TiledBytes", bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` [T, N] of x [T, K].

    Reads each weight once for up to 64 rows of a table, and for 128 rows or more of other weights.
    An output depends only on its own row, and not on the number of threads. Rows in float32 and
    weights in layouts for bfloat16 are seldom together: each call then copies the weight.
    """
    if not isinstance(weight, TiledMatrix):
        if x.dtype == torch.float32:
            return tiled_linear(x, tiled_plain(weight.values()), bias)
        return weight.linear(x, bias)
    if weight.kind in OF_PAIRS and x.dtype == torch.float32:
        plain = plain_of(weight)
        assert plain is not None
        return tiled_linear(x, tiled_plain(plain), bias)
    num_rows, size_in = x.shape
    size_out = weight.shape[0]
    assert size_in == weight.shape[1] and x.stride(1) == 1 and x.dtype in DTYPES
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    out = x.new_empty(num_rows, size_out)
    function("tiled_linear", x.dtype)(
        ctypes.addressof(weight.struct), x.data_ptr(), x.stride(0), address(bias), out.data_ptr(),
        num_rows, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _of_outputs(values: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """Expand a value for each block to a value for each output: [N, groups]."""
    return values.repeat_interleave(weight.block[0], dim=0)[: weight.codes.shape[0]]


def _fill_up(codes: torch.Tensor, group: int, padded: int) -> torch.Tensor:
    """Pad codes [N, K] with zeros after each group and the last output: [tiles, width, P]."""
    size_out, size_in = codes.shape
    num_groups = -(-size_in // group)
    width = constant("tile_outputs")
    if size_out % width == 0 and num_groups * padded == size_in:
        return codes.reshape(-1, width, size_in)
    filled = codes.new_zeros(_round_up(size_out, width), num_groups, padded)
    whole = size_in // group
    filled[:size_out, :whole, :group] = codes[:, : whole * group].reshape(size_out, -1, group)
    if whole < num_groups:
        filled[:size_out, whole, : size_in % group] = codes[:, whole * group :]
    return filled.view(-1, width, num_groups * padded)


def _tiled_codes(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Transpose codes [tiles, width, P] to [tiles, P, width]; 8 inputs of 4 bits make a word."""
    if kind != "int4":
        return huge_pages.contiguous(codes.transpose(1, 2))
    low, high = (codes & 15).view(*codes.shape[:2], -1, 4, 2).unbind(4)
    return huge_pages.contiguous((low | high << 4).transpose(1, 2))


def _tiled(values: torch.Tensor) -> torch.Tensor:
    """Tile values [N, groups] to [tiles, groups, width], padded with zeros."""
    width = constant("tile_outputs")
    filled = values.new_zeros(_round_up(len(values), width), values.shape[1])
    filled[: len(values)] = values
    return filled.view(-1, width, values.shape[1]).transpose(1, 2).contiguous()


def _places(
    order: torch.Tensor | None, size_in: int, group: int, padded: int
) -> torch.Tensor | None:
    """The input at each of the P places, or -1; None if the places are x in its own order."""
    num_places = -(-size_in // group) * padded
    if order is None and num_places == size_in:
        return None
    filled = torch.full((num_places,), -1, dtype=torch.int32)
    columns = torch.arange(size_in)
    filled[columns // group * padded + columns % group] = (
        columns if order is None else order
    ).int()
    return filled
