"""BlockPlanes: a weight of a GGUF file in the layout that the Triton kernels read.

T rows, K inputs, N outputs, R runs of RUN inputs. The bits of codes and scales are those of the
file, so nothing is rounded; only their order differs. What a tile of outputs and a run of inputs
needs is contiguous, and is loaded in whole words.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.integers import cdiv
from nanovllm.kernels.operands.block_matrix import BlockMatrix
from nanovllm.kernels.triton.linear.block_parts import BlockParts, parts_of

RUN = 128  # inputs that a kernel takes at a time
SUPER_RUNS = 2  # runs with one super scale
LEAST_OUTPUTS = 16  # of a tile
MOST_ROW_TILES = 4  # of products whose inputs are divided among programs
CHUNK = 1 << 24  # values that are arranged at a time
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}


@dataclass(frozen=True, slots=True)
class BlockPlanes:
    """A weight [N, K]; K is padded to whole runs, with scales of zero.

    The lowest 2, 4 or 8 bits of all codes are the plane `low`, and the other ones the plane `high`.
    The input `16 * s + 8 * j + 2 * q + h` of a run belongs to the step s, and to the thread q of
    four in a tensor core. A plane of b bits has b words for each q. With w = 2 * j + h and t =
    s // 2, the bits of a code begin in

        word w * b // 4, at 16 * (s % 2) + 4 * t + b * w % 4          of a plane of 1, 2 or 4 bits
        word w of the words for s % 2, at 8 * t                       of a plane of 8 bits

    The value of a code c is `number(c) * scale - min`. With `supers`, scales and mins are bytes
    that the two float16 numbers of a super word multiply; its upper half is for the min. With
    "nibbles", the upper 4 bits of a scale are the min. Without, scales and mins are float16 or
    bfloat16.
    """

    low: torch.Tensor  # int32 [R, N, 4 * b], those of q together
    high: torch.Tensor | None
    scales: torch.Tensor  # int32 [R, N, words]
    mins: torch.Tensor | None
    supers: torch.Tensor | None  # int32 [ceil(R / SUPER_RUNS), N]
    shape: tuple[int, int]  # N and K
    kind: str
    parts: BlockParts  # of one row: what the codes and scales are
    arrivals: torch.Tensor  # int32 zeros, for kernels that divide K among programs

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def runs(self) -> int:
        return self.low.shape[0]

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads."""
        tensors = (self.low, self.high, self.scales, self.mins, self.supers)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `block_values.load_values` reads; those that a type lacks are not read."""
        return (
            self.low, self.low if self.high is None else self.high, self.scales,
            self.scales if self.mins is None else self.mins,
            self.low if self.supers is None else self.supers,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of `block_values.load_values`."""
        parts = self.parts
        low, high = PLANES[parts.bits]
        return dict(
            LOW=low, HIGH=high, CENTER=parts.center, NUMBERS=parts.numbers,
            GROUPS=RUN // parts.group, SCALES=parts.scale_type, SCALE_CENTER=parts.scale_center,
            MINS=parts.mins is not None or parts.scale_type == "nibbles",
            WEIGHT_N=self.shape[0],
        )  # fmt: skip


def arrange_blocks(weight: BlockMatrix) -> BlockPlanes:
    """Copy a weight into planes. Peak memory: 16 bytes for each of CHUNK values."""
    size_out, size_in = weight.shape
    rows = max(1, CHUNK // size_in)
    first = parts_of(weight.codes[:1], weight.kind)
    low, high = PLANES[first.bits]
    runs = cdiv(size_in, RUN)
    assert runs * size_out * 4 * low < 1 << 31, "kernels compute offsets in 32 bits"

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=weight.codes.device)

    words = RUN // first.group * first.scales.itemsize // 4
    planes = BlockPlanes(
        low=zeros(runs, size_out, 4 * low),
        high=zeros(runs, size_out, 4 * high) if high else None,
        scales=zeros(runs, size_out, words),
        mins=None if first.mins is None else zeros(runs, size_out, words),
        supers=None if first.supers is None else zeros(cdiv(runs, SUPER_RUNS), size_out),
        shape=(size_out, size_in),
        kind=weight.kind.name,
        parts=first,
        arrivals=zeros(MOST_ROW_TILES * cdiv(size_out, LEAST_OUTPUTS)),
    )
    for begin in range(0, size_out, rows):
        _fill(planes, begin, parts_of(weight.codes[begin : begin + rows], weight.kind))
    return planes


def _fill(planes: BlockPlanes, begin: int, parts: BlockParts) -> None:
    """Store the rows from `begin` on."""
    low, high = PLANES[parts.bits]
    rows, groups = slice(begin, begin + len(parts.codes)), RUN // parts.group
    codes = _in_runs(parts.codes, RUN)
    planes.low[:, rows] = plane_of(codes & ((1 << low) - 1), low)
    if planes.high is not None:
        planes.high[:, rows] = plane_of(codes >> low, high)
    planes.scales[:, rows] = _in_words(_in_runs(parts.scales, groups))
    if planes.mins is not None and parts.mins is not None:
        planes.mins[:, rows] = _in_words(_in_runs(parts.mins, groups))
    if planes.supers is not None and parts.supers is not None:
        planes.supers[:, rows] = parts.supers.t()


def _in_runs(values: torch.Tensor, size: int) -> torch.Tensor:
    """Values [n, any] as [R, n, size], with zeros in the end."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % size))
    return padded.view(len(values), -1, size).transpose(0, 1)


def _in_words(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def plane_of(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack fields [R, n, RUN] of a number of bits into words [R, n, 4 * bits]."""
    runs, rows, _ = fields.shape
    # By t, s % 2, j, q and h.
    split = fields.reshape(runs, rows, 4, 2, 2, 4, 2).int()

    def times(count: int, step: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=fields.device) * step

    if bits == 8:
        words = (split << times(4, 8).view(4, 1, 1, 1, 1)).sum(2, dtype=torch.int32)
        return words.permute(0, 1, 2, 4, 3, 5).reshape(runs, rows, 32)  # s % 2, q, j, h
    split = split << times(4, 4).view(4, 1, 1, 1, 1) << times(2, 16).view(2, 1, 1, 1)
    by_w = split.sum((2, 3), dtype=torch.int32).transpose(2, 3)  # q, j, h
    by_word = by_w.reshape(runs, rows, 4, bits, 4 // bits) << times(4 // bits, bits)
    return by_word.sum(-1, dtype=torch.int32).view(runs, rows, 4 * bits)
