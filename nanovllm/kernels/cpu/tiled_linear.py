"""Linear layers with weights in tiles: plain ones, or codes that stay codes in memory.

T rows, K inputs, N outputs. Everything is float32: inputs are not rounded, whatever a quantized
weight allows, and bfloat16 is rounded once, at the end. AMX is not used: on processors that have
it, bfloat16 prompts of many tokens are faster with `packed_linear`, decoding is not.
"""

import ctypes
from dataclasses import dataclass, field

import torch

from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.library import DTYPES, address, constant, function
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

KINDS = ("int8", "int4", "e4m3", "bfloat16", "float32")  # as `Kind` of tiled_linear.h numbers them
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

    Each group's inputs are filled up with zeros to whole blocks, so that there are P of them.
    """

    codes: torch.Tensor  # bytes: a weight of 8 bits has one, of 4 bits half a byte; or numbers
    scales: torch.Tensor | None  # [tiles, groups, outputs of a tile]
    zeros: torch.Tensor | None  # the same, int8
    order: torch.Tensor | None  # [P], int32: the input at each place, or -1; None: in x's order
    kind: str  # of KINDS
    shape: tuple[int, int]  # N, K
    blocks: int
    depth: int  # inputs of a block
    blocks_of_group: int
    # What the kernel reads: addresses, so that the tensors' memory must stay where it is.
    struct: MatrixStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        struct = MatrixStruct(
            self.codes.data_ptr(), address(self.scales), address(self.zeros), address(self.order),
            self.shape[0], self.depth, self.blocks, self.blocks_of_group, KINDS.index(self.kind),
        )  # fmt: skip
        object.__setattr__(self, "struct", struct)


def arrange(weight: QuantizedMatrix) -> TiledMatrix:
    """Copy a weight [N, K] into the kernel's layout.

    Peak memory: 4 bytes for each weight, the copied codes included.
    """
    assert weight.codes.dim() == 2, "the matrices of a stack are arranged one by one"
    kind = "e4m3" if weight.codes.dtype == torch.float8_e4m3fn else f"int{weight.bits}"
    group = min(weight.block[1], weight.codes.shape[1])
    scales = _of_outputs(weight.scales.float(), weight)
    codes = weight.codes.view(torch.uint8)
    if kind == "e4m3":
        # A NaN becomes its group's scale: the kernel's codes have none.
        scales = scales * constant("e4m3_unit")
        nan = (codes & 0x7F) == 0x7F
        if nan.any():
            outputs, inputs = nan.nonzero(as_tuple=True)
            scales[outputs, inputs // group] = torch.nan
    zeros = None if weight.zeros is None else _tiled(_of_outputs(weight.zeros, weight))
    return _arranged(codes, kind, group, _tiled(scales), zeros, weight.order)


def arrange_plain(weight: torch.Tensor) -> TiledMatrix | None:
    """The same of a plain weight, or None where oneDNN is faster. Peak memory: three weights."""
    if weight.dtype not in processor.products().tiled:
        return None
    return _arranged(weight.detach(), PLAIN[weight.dtype], weight.shape[1])


def plain_of(weight: TiledMatrix) -> torch.Tensor | None:
    """The plain weight [N, K] that `arrange_plain` copied; None if it was a quantized one."""
    if weight.kind not in PLAIN.values():
        return None
    size_out, size_in = weight.shape
    return weight.codes.transpose(1, 2).flatten(0, 1)[:size_out, :size_in].contiguous()


def _arranged(
    codes: torch.Tensor,
    kind: str,
    group: int,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> TiledMatrix:
    """A matrix of codes [N, K] with groups of this many inputs, each divided into even blocks."""
    size_out, size_in = codes.shape
    depth = min(constant("max_depth"), _round_up(group, constant("step_inputs")))
    padded = _round_up(group, depth)
    return TiledMatrix(
        codes=_tiled_codes(_fill_up(codes, group, padded), kind),
        scales=scales,
        zeros=zeros,
        order=_places(order, size_in, group, padded),
        kind=kind,
        # A matrix may have more columns than inputs: some are zero, to fill up groups.
        shape=(size_out, size_in if order is None else int(order.max()) + 1),
        blocks=-(-size_in // group) * (padded // depth),
        depth=depth,
        blocks_of_group=padded // depth,
    )


def tiled_linear(
    x: torch.Tensor, weight: TiledMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` of x [T, K]: [T, N]. Reads each weight once for up to 256 rows.

    An output depends on its own row alone, and not on the number of threads.
    """
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
    """The values of blocks as values of each output: [N, groups]."""
    return values.repeat_interleave(weight.block[0], dim=0)[: weight.codes.shape[0]]


def _fill_up(codes: torch.Tensor, group: int, padded: int) -> torch.Tensor:
    """Codes [N, K] with zeros after each group, and after the last output: [tiles, width, P]."""
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
    """[tiles, P, width] of codes [tiles, width, P]; of 4 bits, eight inputs in a word."""
    if kind != "int4":
        return codes.transpose(1, 2).contiguous()
    low, high = (codes & 15).view(*codes.shape[:2], -1, 4, 2).unbind(4)
    return (low | high << 4).transpose(1, 2).contiguous()


def _tiled(values: torch.Tensor) -> torch.Tensor:
    """[tiles, groups, width] of values [N, groups], filled up with zeros."""
    width = constant("tile_outputs")
    filled = values.new_zeros(_round_up(len(values), width), values.shape[1])
    filled[: len(values)] = values
    return filled.view(-1, width, values.shape[1]).transpose(1, 2).contiguous()


def _places(
    order: torch.Tensor | None, size_in: int, group: int, padded: int
) -> torch.Tensor | None:
    """The input at each of the P places, or -1; None if they are x itself."""
    num_places = -(-size_in // group) * padded
    if order is None and num_places == size_in:
        return None
    filled = torch.full((num_places,), -1, dtype=torch.int32)
    columns = torch.arange(size_in)
    filled[columns // group * padded + columns % group] = (
        columns if order is None else order
    ).int()
    return filled
