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
LEAST_OUTPUTS = 64  # outputs are padded to a multiple
MOST_ROW_TILES = 4  # of products whose inputs are divided among programs
CHUNK = 1 << 24  # values that are arranged at a time
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}


@dataclass(frozen=True, slots=True)
class BlockPlanes:
    """A weight [N, K]; N is padded to `padded_out`, K to whole runs, with scales of zero.

    The lowest 2, 4 or 8 bits of all codes are the plane `low`, and the other ones the plane `high`.
    A plane of b bits has 4 * b words for a run of an output. The word of (w, q) has the codes of
    the inputs `16 * s + 8 * j + 2 * q + h` for s in [w * 8 / b, (w + 1) * 8 / b), and j and h in
    (0, 1), at the bit `16 * h + b * (2 * (s % (8 / b)) + j)`: a thread of a tensor core multiplies
    the inputs of one q, and two codes become two numbers at a time.

    The value of a code c is `number(c) * scale - min`. If there are `supers`, the scale and the min
    are whole numbers to be multiplied by the two float16 numbers of a super word; its upper half is
    for the min. Types of 32 values have a float16 or bfloat16 scale, and a min that is minus the
    file's.
    """

    low: torch.Tensor  # int32 [R, padded_out, 4 * bits]
    high: torch.Tensor | None
    scales: torch.Tensor  # [R, padded_out, RUN / group]
    mins: torch.Tensor | None
    supers: torch.Tensor | None  # int32 [ceil(R / SUPER_RUNS), padded_out]
    shape: tuple[int, int]  # N and K
    kind: str
    center: int  # of the codes: the code of zero
    numbers: str  # how codes become numbers: "linear", "iq4" or "fp4"
    bits: tuple[int, int]  # of the planes
    group: int
    in_nibbles: bool  # the upper 4 bits of a scale are the min
    arrivals: torch.Tensor  # int32 zeros, for kernels that divide K among programs

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def runs(self) -> int:
        return self.low.shape[0]

    @property
    def padded_out(self) -> int:
        return self.low.shape[1]

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
        return dict(
            LOW=self.bits[0], HIGH=self.bits[1], CENTER=self.center, NUMBERS=self.numbers,
            GROUPS=RUN // self.group, MINS=2 if self.in_nibbles else int(self.mins is not None),
            SUPERS=self.supers is not None, PADDED_N=self.padded_out,
        )  # fmt: skip


def arrange_blocks(weight: BlockMatrix) -> BlockPlanes:
    """Copy a weight into planes. Peak memory: 16 bytes for each of CHUNK values."""
    size_out, size_in = weight.shape
    rows = max(1, CHUNK // size_in)
    first = parts_of(weight.codes[:1], weight.kind)
    low, high = PLANES[first.bits]
    runs, outputs = cdiv(size_in, RUN), cdiv(size_out, LEAST_OUTPUTS) * LEAST_OUTPUTS
    zeros = weight.codes.new_zeros
    groups = RUN // first.group
    planes = BlockPlanes(
        low=zeros(runs, outputs, 4 * low, dtype=torch.int32),
        high=zeros(runs, outputs, 4 * high, dtype=torch.int32) if high else None,
        scales=zeros(runs, outputs, groups, dtype=first.scales.dtype),
        mins=None if first.mins is None else zeros(runs, outputs, groups, dtype=first.mins.dtype),
        supers=None
        if first.supers is None
        else zeros(cdiv(runs, SUPER_RUNS), outputs, dtype=torch.int32),
        shape=(size_out, size_in),
        kind=weight.kind.name,
        center=first.center,
        numbers=first.numbers,
        bits=(low, high),
        group=first.group,
        in_nibbles=first.in_nibbles,
        arrivals=zeros(MOST_ROW_TILES * outputs // LEAST_OUTPUTS, dtype=torch.int32),
    )
    for begin in range(0, size_out, rows):
        _fill(planes, begin, parts_of(weight.codes[begin : begin + rows], weight.kind))
    return planes


def _fill(planes: BlockPlanes, begin: int, parts: BlockParts) -> None:
    """Store the rows from `begin` on."""
    low, high = planes.bits
    rows = slice(begin, begin + len(parts.codes))
    codes = _in_runs(parts.codes, RUN)
    planes.low[:, rows] = plane_of(codes & ((1 << low) - 1), low)
    if planes.high is not None:
        planes.high[:, rows] = plane_of(codes >> low, high)
    planes.scales[:, rows] = _in_runs(parts.scales, RUN // parts.group)
    if planes.mins is not None and parts.mins is not None:
        planes.mins[:, rows] = _in_runs(parts.mins, RUN // parts.group)
    if planes.supers is not None and parts.supers is not None:
        planes.supers[:, rows] = parts.supers.t()


def _in_runs(values: torch.Tensor, size: int) -> torch.Tensor:
    """Values [n, any] as [R, n, size], with zeros in the end."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % size))
    return padded.view(len(values), -1, size).transpose(0, 1)


def plane_of(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack fields [R, n, RUN] of a number of bits into words [R, n, 4 * bits]."""
    steps = 8 // bits
    runs, rows, _ = fields.shape
    at = torch.arange(2 * steps, dtype=torch.int32, device=fields.device) * bits
    shifts = at.view(steps, 2, 1, 1) + at.new_tensor([0, 16])
    split = fields.reshape(runs, rows, bits, steps, 2, 4, 2).int()
    words = (split << shifts).sum((3, 4, 6), dtype=torch.int32)
    return words.view(runs, rows, 4 * bits)
