"""Linear layers with weights in oneDNN's blocked layout, for processors on which that is fastest.

`F.linear` reorders a plain weight in each call, or reads it in an order that is slow for the CPU's
matrix kernels; a packed weight is reordered once.

oneDNN compiles a kernel for each number of rows and shape of a weight, which takes longer than a
product of few rows, and keeps a thousand of them, of half a megabyte each. So only 96 numbers of
rows up to 8,192 occur: many rows are padded with zeros, by less than an eighth.
"""

import functools

import torch

MOST_EXACT = 32  # up to this many rows are not padded
SIZES_OF_OCTAVE = 8  # padded numbers of rows from a power of two to the next


@functools.cache
def packed_types() -> frozenset[torch.dtype]:
    """The types that oneDNN multiplies fast on this processor. Most builds of PyTorch contain it.

    Callers read this function from the module, so that tests can replace it.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset((torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,))


def computes(dtype: torch.dtype) -> bool:
    """Whether PyTorch has matrix kernels for `dtype` on this CPU, not only an emulation."""
    return dtype == torch.float32 or dtype in packed_types()


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine has kernels for packed weights of this type."""
    return weight.device.type == "cpu" and weight.dtype in packed_types()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Copy `weight` [out, in] into oneDNN's layout for `packed_linear`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for a weight from `pack`. Reads each weight once."""
    num_rows = len(x)
    if num_rows > MOST_EXACT:
        unit = (1 << (num_rows - 1).bit_length()) // (2 * SIZES_OF_OCTAVE)
        if missing := -num_rows % unit:
            x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out if len(x) == num_rows else out[:num_rows]
