"""Scheme: how the weights of a linear layer are quantized. Plain data, no PyTorch."""

from dataclasses import dataclass
from typing import Literal

Storage = Literal["fp8", "int8", "packed", "awq", "gptq", "int4", "gguf", "mxfp4"]
NAMES = {
    "fp8": "FP8", "int8": "8-bit", "packed": "{bits}-bit, packed", "awq": "{bits}-bit, AWQ",
    "gptq": "{bits}-bit, GPTQ", "int4": "{bits}-bit",
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """The meaning of a checkpoint's quantized tensors.

    `storage` says how codes are stored. A scale belongs to `rows` x `columns` weights of a matrix
    [out, in]; None is all of them. "float" inputs are not rounded. Others may be rounded to the
    type of the codes, with a "static" scale that the checkpoint has, or a "dynamic" one that is
    computed from them.
    """

    storage: Storage
    bits: int
    rows: int | None
    columns: int | None
    zeros: bool = False  # whether there are zero points; else codes are symmetric
    inputs: Literal["float", "static", "dynamic"] = "float"
    ordered: bool = False  # whether a tensor assigns the columns to groups
    zero_offset: int = 0  # what must be added to stored zero points
    while_loading: bool = False  # whether we quantize plain weights of the checkpoint
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"

    @property
    def description(self) -> str:
        """In words, for people."""
        if self.rows is None:
            scales = "a scale for each matrix"
        elif self.columns is None:
            scales = "a scale for each output"
        elif self.rows == 1:
            scales = f"groups of {self.columns}"
        else:
            scales = f"blocks of {self.rows} x {self.columns}"
        zeros = " with zero points" if self.zeros else ""
        inputs = "" if self.inputs == "float" else f", {self.inputs} inputs"
        return f"{NAMES[self.storage].format(bits=self.bits)}, {scales}{zeros}{inputs}"

    def num_bytes(self, num_weights: int, size_in: int) -> int:
        """About the memory of `num_weights` with `size_in` inputs, in the kernels' layout."""
        columns = self.columns or size_in
        of_scale = (4 if self.columns is None or self.rows != 1 else 2) + self.zeros
        scales = num_weights * of_scale // (columns * (self.rows or 1))
        return num_weights * self.bits // 8 + scales


FP8 = Scheme("fp8", 8, rows=1, columns=None, inputs="dynamic", while_loading=True)
INT8 = Scheme("int8", 8, rows=1, columns=None, while_loading=True)
INT4 = Scheme("int4", 4, rows=1, columns=32, while_loading=True)
DEQUANTIZE = "dequantize"  # the value of `quantization=` for plain weights of a GGUF file
DEQUANTIZED = "nanovllm_dequantized"  # in the config.json that is made for them
# What `quantization=` makes of plain weights: those of the layers, and those of the head. In
# FP8, rounding the head's inputs would cost the most quality, and float inputs would save little
# time with many requests.
ONLINE: dict[str, tuple[Scheme, Scheme | None]] = {
    "fp8": (FP8, None), "int8": (INT8, INT8), "int4": (INT4, INT8),
}  # fmt: skip
