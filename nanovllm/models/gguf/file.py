"""GGUFFile: what one GGUF file has, its metadata and the places of its tensors. No PyTorch here."""

import math
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.kernels.operands.block_types import BLOCK_TYPES, BlockType
from nanovllm.models.file_errors import file_error
from nanovllm.models.gguf.reader import Array, Reader, damaged

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_NAME = (1 << 16) - 1  # bytes of a key, or of a tensor's name
MAX_DIMS = 4
ALIGNMENT = 32  # of tensors, if the file does not say another
UINT32, UINT64 = 4, 10

# Types of plain numbers, by the names of safetensors.
PLAIN_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("F64", 28, 1, 8),
        BlockType("BF16", 30, 1, 2),
    )
}
TYPES = {kind.number: kind for kind in (*PLAIN_TYPES.values(), *BLOCK_TYPES.values())}
# The names of other types, for errors.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """A tensor in a file: `num_bytes` bytes from `start` on."""

    kind: BlockType
    shape: tuple[int, ...]  # of values, in PyTorch's order
    start: int
    num_bytes: int


class GGUFFile:
    """The metadata and the tensors of a file, whose content is mapped into memory.

    Invariant: each tensor ends within the file, and its rows have whole blocks.
    """

    def __init__(self, path: Path) -> None:
        """Read a file. A damaged one is an OSError, an unsupported one a ValueError."""
        self.path = path
        if not path.is_file():  # opening a FIFO would wait for a writer
            raise file_error(path)
        with path.open("rb") as stream:
            if not stream.read(1):
                raise damaged(path, "it is empty")
            self.data = mmap(stream.fileno(), 0, access=ACCESS_READ)
        reader = Reader(path, self.data)
        num_tensors = self._read_header(reader)
        self.metadata = self._read_metadata(reader)
        self.tensors = self._read_tensors(reader, num_tensors)

    def items(self, key: str) -> list[Any]:
        """The items of an array; none if the file does not have it."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, Array):
            raise damaged(self.path, f"{key} must be an array")
        return value.values()

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of float32, as the shortest decimals for them."""
        info = self.tensors[name]
        if info.kind.name != "F32" or info.num_bytes > 1 << 16:
            raise damaged(self.path, f"tensor {name!r} has type {info.kind.name} and {info.shape}")
        values = np.frombuffer(self.data, "<f4", info.num_bytes // 4, info.start)
        return [float(str(value)) for value in values]

    def _read_header(self, reader: Reader) -> int:
        """Check magic and version, and return the number of tensors."""
        if self.data[:4] != MAGIC:
            raise OSError(f"{self.path} is no GGUF file: it begins with {self.data[:4]!r}")
        reader.pos = len(MAGIC)
        version = reader.number(UINT32, "the version")
        if version & 0xFFFF == 0:
            raise ValueError(f"{self.path} is a big-endian GGUF file; only little-endian ones are"
                             " supported")  # fmt: skip
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ValueError(f"{self.path} has version {version} of GGUF; {known} are supported")
        return reader.count("the number of tensors", 32)

    def _read_metadata(self, reader: Reader) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(reader.count("the number of metadata keys", 13)):
            key = reader.text("a metadata key", MAX_NAME)
            if key in metadata:
                reader.fail(f"{key} occurs twice")
            metadata[key] = reader.value(reader.number(UINT32, key), key)
        return metadata

    def _read_tensors(self, reader: Reader, number: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            reader.fail(f"general.alignment is {alignment!r}")
        found: dict[str, TensorInfo] = {}
        for _ in range(number):
            name = reader.text("a tensor's name", MAX_NAME)
            if name in found:
                reader.fail(f"tensor {name!r} occurs twice")
            found[name] = self._read_info(reader, name)
        first = -(-reader.pos // alignment) * alignment  # offsets count from here
        for name, info in found.items():
            end = first + info.start + info.num_bytes
            if info.start % alignment or end > reader.size:
                reader.fail(f"tensor {name!r} ends at byte {end:,}, the file has {reader.size:,}")
            found[name] = info._replace(start=first + info.start)
        return found

    def _read_info(self, reader: Reader, name: str) -> TensorInfo:
        """The next tensor; its place is relative to the first tensor's."""
        what = f"tensor {name!r}"
        num_dims = reader.number(UINT32, what)
        if not 1 <= num_dims <= MAX_DIMS:
            reader.fail(f"{what} has {num_dims} dimensions")
        shape = tuple(reader.number(UINT64, what) for _ in range(num_dims))[::-1]
        number, start = reader.number(UINT32, what), reader.number(UINT64, what)
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            found = OTHER_TYPES.get(number, f"number {number}")
            raise ValueError(f"{self.path}: {what} has type {found}, which is not supported;"
                             f" {known} are")  # fmt: skip
        kind = TYPES[number]
        if shape[-1] % kind.size or not all(shape):
            reader.fail(f"{what} has shape {shape}, but {kind.name} has blocks of {kind.size}")
        return TensorInfo(kind, shape, start, math.prod(shape) // kind.size * kind.num_bytes)
