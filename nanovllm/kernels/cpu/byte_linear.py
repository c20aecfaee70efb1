"""Linear layers of bfloat16 models with weights of 8 bits that have one scale for each output.

T rows, K inputs, N outputs. Inputs are rounded to integers of 14 bits for each 256 inputs, which is
below their own error. Their products are exact; sums of 256 inputs are added in float32, in the
order of the inputs. Each output depends only on its own row: it is the same, bit for bit, for any
number of rows and threads.
"""

import ctypes
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from nanovllm.kernels.cpu import huge_pages, processor
from nanovllm.kernels.cpu.library import address, constant, function
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

ZERO = 128  # the code of 0 in tiles


class BytesStruct(ctypes.Structure):
    """`ByteMatrix` of byte_products.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    )


@dataclass(frozen=True, slots=True)
class TiledBytes:
    """A weight [N, K] in tiles of 16 outputs, as byte_products.h describes them."""

    codes: torch.Tensor  # uint8 [tiles, K / 4, 16, 4]
    scales: torch.Tensor  # float32 [tiles, 16]
    shape: tuple[int, int]  # N, K
    # The addresses that the kernel reads; the tensors' memory must not move.
    struct: BytesStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        struct = BytesStruct(self.codes.data_ptr(), self.scales.data_ptr(), *self.shape)
        object.__setattr__(self, "struct", struct)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with rows [T, K]."""
        return byte_linear(x, self, bias)

    def values(self) -> torch.Tensor:
        """The weight [N, K] in float32."""
        size_out, size_in = self.shape
        codes = self.codes.transpose(1, 2).reshape(-1, size_in).float() - ZERO
        return (codes * self.scales.view(-1, 1))[:size_out]


def fits(weight: QuantizedMatrix) -> bool:
    """Whether the weight can be in such tiles, and they are faster for its model."""
    size_in = weight.codes.shape[-1]
    return (
        weight.input_dtype == torch.bfloat16 and weight.codes.dtype == torch.int8
        and weight.bits == 8 and weight.block[1] >= size_in and weight.zeros is None
        and weight.order is None and weight.codes.dim() == 2 and processor.multiplies_bytes()
        and size_in % constant("inputs_of_chunk") == 0
    )  # fmt: skip


def arrange_bytes(weight: QuantizedMatrix) -> TiledBytes:
    """Copy a weight that fits into tiles. Peak memory: 3 bytes for each weight."""
    size_out, size_in = weight.codes.shape
    width = constant("outputs_of_tile")
    missing = -size_out % width
    codes = F.pad(weight.codes, (0, 0, 0, missing)).view(torch.uint8) ^ ZERO
    of_outputs = weight.scales.float().repeat_interleave(weight.block[0], dim=0)[:size_out]
    scales = F.pad(of_outputs.flatten(), (0, missing))
    tiles = huge_pages.contiguous(codes.view(-1, width, size_in // 4, 4).transpose(1, 2))
    return TiledBytes(tiles, scales.view(-1, width), (size_out, size_in))


def byte_linear(
    x: torch.Tensor, weight: TiledBytes, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` [T, N] of x [T, K]."""
    num_rows, size_in = x.shape
    assert size_in == weight.shape[1] and x.stride(1) == 1 and x.dtype == torch.bfloat16
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    out = x.new_empty(num_rows, weight.shape[0])
    function("byte_linear", x.dtype)(
        ctypes.addressof(weight.struct), x.data_ptr(), x.stride(0), address(bias), out.data_ptr(),
        num_rows, torch.get_num_threads(),
    )  # fmt: skip
    return out
