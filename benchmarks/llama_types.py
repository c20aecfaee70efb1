"""Weights in the types of GGUF that only llama.cpp quantizes to."""

import subprocess
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

LLAMA_TYPES = ("Q6_K", "Q5_K", "Q4_K", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K")
BLOCK = 256  # weights: a multiple of the blocks of all these types
QUANTIZE = """
import ctypes, sys
from pathlib import Path
import llama_cpp
import numpy as np

number, source, target, num_bytes = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
(file,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
quantize = ctypes.CDLL(str(file)).ggml_quantize_chunk
size, pointer = ctypes.c_int64, ctypes.c_void_p
quantize.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
values, blocks = np.fromfile(source, np.float32), np.zeros(num_bytes, np.uint8)
quantize(number, values.ctypes.data, blocks.ctypes.data, 0, len(values) // 256, 256, None)
blocks.tofile(target)
"""


def by_llama(
    matrices: list[NDArray[np.float32]], name: str, folder: Path, python: str
) -> list[NDArray[np.float32]]:
    """The matrices, rounded to a type by `python`, which has the package llama-cpp-python.

    Their rows are joined, as if a matrix was one row: those of a small model are no multiples of
    the blocks. Peak memory: twice the matrices.
    """
    kind = gguf.GGMLQuantizationType[name]
    source, target = folder / "values", folder / "blocks"
    with source.open("wb") as file:
        for matrix in matrices:
            if matrix.size % BLOCK:
                raise ValueError(f"{matrix.shape} is no multiple of {BLOCK} weights")
            matrix.astype(np.float32).tofile(file)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    total = sum(matrix.size for matrix in matrices) // size * num_bytes
    command = [python, "-c", QUANTIZE, str(int(kind)), str(source), str(target), str(total)]
    subprocess.run(command, check=True)
    blocks, found, start = np.fromfile(target, np.uint8), [], 0
    for matrix in matrices:
        part = blocks[start : start + matrix.size // size * num_bytes]
        start += len(part)
        found.append(gguf.quants.dequantize(part, kind).reshape(matrix.shape))
    source.unlink()
    target.unlink()
    return found
