"""Products of heads that have a matrix each. The sizes are T rows, H heads, K inputs, N outputs."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.kernels.cpu.library import function
from nanovllm.kernels.cpu.tiled_linear import TiledMatrix


class TiledHeads:
    """The weights of heads, each [N, K] and a `TiledMatrix`."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        assert all(isinstance(matrix, TiledMatrix) for matrix in matrices)
        self.matrices = matrices
        addresses = (ctypes.addressof(matrix.struct) for matrix in matrices)
        self._addresses = (ctypes.c_void_p * len(matrices))(*addresses)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T` for each head, [T, H, N] of x [T, H, K]; heads come first in memory.

        An output depends only on its own row.
        """
        (num_rows, num_heads, size_in), (size_out, _) = x.shape, self.matrices[0].shape
        assert num_heads == len(self.matrices) and size_in == self.matrices[0].shape[1]
        assert x.stride(2) == 1
        out = x.new_empty(num_heads, num_rows, size_out)
        function("heads_linear", x.dtype)(
            ctypes.addressof(self._addresses), num_heads, x.data_ptr(), x.stride(0), x.stride(1),
            out.data_ptr(), num_rows, torch.get_num_threads(),
        )  # fmt: skip
        return out.transpose(0, 1)
