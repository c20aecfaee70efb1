"""The functions that multiply by a matrix, for C++ code that calls them itself."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.kernels.cpu.library import address, function

ANY_NUMBER = 2**62  # of rows


class ProductStruct(ctypes.Structure):
    """`Product` of whole_blocks.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("few", "many", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("most_few", "outputs")),
    )


def function_address(name: str, dtype: torch.dtype | str = "any") -> Any:
    """The address of a function of the library."""
    found: Any = function(name, dtype)
    return ctypes.cast(found, ctypes.c_void_p).value


def multipliers(operand: Any, dtype: torch.dtype) -> tuple[str, str, int] | None:
    """The functions for few rows and for more, and the most rows that are few.

    They are those that `tiled_linear`, `block_linear` and `byte_linear` call for this operand, and
    take the address of its `struct`. None if there are no such functions.
    """
    kind = type(operand).__name__
    if kind == "TiledMatrix":
        return "tiled_linear", "tiled_linear", ANY_NUMBER
    if kind == "TiledBlocks":
        return "block_linear", "block_linear", ANY_NUMBER
    if kind == "TiledBytes" and dtype == torch.bfloat16:
        return "byte_linear", "byte_linear", ANY_NUMBER
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
        names = multipliers(operand, dtype)
        if names is None or operand.shape[1] != size_in:
            return None
        size_out = operand.shape[0]
        part = None if bias is None else bias[start : start + size_out]
        few, many, most_few = names
        functions = [function_address(name, dtype) for name in (few, many)]
        struct = ctypes.addressof(operand.struct)
        made.append(ProductStruct(*functions, struct, address(part), most_few, size_out))
        start += size_out
    return (ProductStruct * len(made))(*made)
