"""Quantized weights in the layout that is fastest on this processor for the model's type."""

from nanovllm.kernels.cpu import byte_linear, tiled_linear
from nanovllm.kernels.cpu.byte_linear import TiledBytes
from nanovllm.kernels.cpu.tiled_linear import TiledMatrix
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix


def arrange(weight: QuantizedMatrix) -> TiledMatrix | TiledBytes:
    """Copy a weight [N, K] into tiles."""
    if byte_linear.fits(weight):
        return byte_linear.arrange_bytes(weight)
    return tiled_linear.arrange(weight)
