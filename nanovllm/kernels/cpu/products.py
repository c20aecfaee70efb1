"""The functions that multiply by a matrix, for C++ code that calls them itself."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.kernels.cpu.library import address, function
from nanovllm.kernels.cpu.tiled_linear import OF_PAIRS


class ProductStruct(ctypes.Structure):
    """`Product` of whole_blocks.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "weight", "bias")),
        ("outputs", ctypes.c_int64),
    )


def function_address(name: str, dtype: torch.dtype | str = "any") -> Any:
    """The address of a function of the library."""
    found: Any = function(name, dtype)
    return ctypes.cast(found, ctypes.c_void_p).value


def multiplier(operand: Any, dtype: torch.dtype) -> str | None:
    """The function that multiplies rows of a type; None if there is none.

    `tiled_linear`, `block_linear` and `byte_linear` call it for this operand. It takes the address
    of the operand's `struct`.
    """
    kind = type(operand).__name__
    if kind == "TiledMatrix" and (dtype == torch.bfloat16 or operand.kind not in OF_PAIRS):
        return "tiled_linear"
    if kind == "TiledBlocks":
        return "block_linear"
    if kind == "TiledBytes" and dtype == torch.bfloat16:
        return "byte_linear"
    return None


def products(
    operands: Sequence[Any], bias: torch.Tensor | None, size_in: int, dtype: torch.dtype
) -> "ctypes.Array[ProductStruct] | None":
    """The products of a layer with these operands, one after the other, with parts of its bias.

    None if there is no function for some operand. Whoever uses them keeps the operands.
    """
    made, start = [], 0
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        return None
    for operand in operands:
        name = multiplier(operand, dtype)
        if name is None or operand.shape[1] != size_in:
            return None
        size_out = operand.shape[0]
        part = None if bias is None else bias[start : start + size_out]
        struct = ctypes.addressof(operand.struct)
        multiply = function_address(name, dtype)
        made.append(ProductStruct(multiply, struct, address(part), size_out))
        start += size_out
    return (ProductStruct * len(made))(*made)
