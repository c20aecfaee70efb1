"""ArrangedMatrix: a quantized weight in the layout that the Triton kernels read."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

INNER = 128  # the most inputs that a matrix product takes at a time
LEAST_INNER = 16  # the fewest inputs that tensor cores multiply
WORD = 4  # bytes that a kernel converts at a time
LEAST_OUTPUTS = 16  # the fewest outputs of a tile
MOST_ROW_TILES = 4
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ArrangedMatrix:
    """A weight [N, K], or a stack of weights [E, N, K], as bytes.

    A byte is an int8 or e4m3 code, or two codes of 4 bits: in each run of `2 * inner` inputs, the
    low halves of the bytes are the first `inner` codes plus 8, and the high halves are the others.
    Rows are padded to whole runs; the padding multiplies zeros. Each 16 bytes are in the order of
    `in_word_order`.

    A scale, and a zero point, belongs to `scale_rows` outputs and `group` inputs, or to all inputs
    if `group` is 0.
    """

    codes: torch.Tensor  # [..., N, bytes], int8
    scales: torch.Tensor  # [..., groups, ceil(N / scale_rows)], float32 if one group
    zeros: torch.Tensor | None  # bfloat16, with the shape of `scales`: small whole numbers
    kind: str  # "int8", "e4m3" or "int4"
    shape: tuple[int, ...]  # [..., N, K] without padding
    group: int
    scale_rows: int
    inner: int
    arrivals: torch.Tensor  # int32 zeros, for kernels that divide K among programs
    order: torch.Tensor | None
    rounds_inputs: bool
    input_scale: torch.Tensor | None

    @property
    def has_rows_kernel(self) -> bool:
        """Whether `inner` neighbouring inputs have one scale, as `quantized_rows` requires."""
        return self.group % self.inner == 0

    @property
    def words(self) -> torch.Tensor:
        """The codes as int32 words of four bytes."""
        return self.codes.view(torch.int32)

    @property
    def size_out(self) -> int:
        return self.shape[-2]

    @property
    def size_in(self) -> int:
        return self.shape[-1]

    @property
    def padded_in(self) -> int:
        """The number of inputs of a row, including its padding."""
        return self.codes.shape[-1] * (2 if self.kind == "int4" else 1)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of kernels that read codes and scales."""
        groups, columns = self.scales.shape[-2:]
        return dict(
            GROUPS=groups, GROUP=self.group, COLUMNS=columns, SCALE_ROWS=self.scale_rows,
            KIND=self.kind, ZEROS=self.zeros is not None, INNER=self.inner,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads."""
        tensors = (self.codes, self.scales, self.zeros)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def arrange(weight: QuantizedMatrix) -> ArrangedMatrix:
    """Copy a weight into the layout. Peak memory: two bytes for each code of 4 bits."""
    *_, size_out, size_in = weight.codes.shape
    group = 0 if weight.block[1] >= size_in else weight.block[1]
    inner = group & -group  # the largest power of two that divides the group
    inner = min(inner, INNER) if inner >= LEAST_INNER else INNER
    if weight.bits == 4:
        kind = "int4"
        if inner == INNER and size_in % (2 * INNER):
            inner //= 2
        codes = in_word_order(_in_pairs(weight.codes, inner))
    else:
        kind = "int8" if weight.codes.dtype == torch.int8 else "e4m3"
        codes = in_word_order(_padded(weight.codes.view(torch.int8), INNER))
    scale_rows = weight.block[0]
    scales, zeros = _by_group(weight.scales), _by_group(weight.zeros)
    if scale_rows > 1 and not group:  # a scale for each output still takes little memory
        scales, zeros = (_expand(values, scale_rows, size_out) for values in (scales, zeros))
        scale_rows = 1
    assert scales is not None
    if kind == "e4m3":
        scales, scale_rows = _with_nan(weight.codes, scales, scale_rows)
    return ArrangedMatrix(
        codes=codes,
        scales=scales if group and scales.dtype in FLOATS else scales.float(),
        zeros=None if zeros is None else zeros.bfloat16(),
        kind=kind,
        shape=tuple(weight.codes.shape),
        group=group,
        scale_rows=scale_rows,
        inner=inner,
        arrivals=codes.new_zeros(MOST_ROW_TILES * -(-size_out // LEAST_OUTPUTS), dtype=torch.int32),
        order=weight.order,
        rounds_inputs=weight.rounds_inputs,
        input_scale=weight.input_scale,
    )


def in_word_order(codes: torch.Tensor) -> torch.Tensor:
    """Reorder bytes [..., K] as tensor cores read them, within each 16 inputs.

    A thread with number q multiplies the inputs `2 * q + b` and `2 * q + b + 8` of 16, for b in (0,
    1). These become one word: its bytes 0 and 2 are the first pair, bytes 1 and 3 the second.
    """
    of_16 = codes.view(*codes.shape[:-1], -1, 2, 4, 2)
    return of_16.movedim(-3, -1).flatten(-4).contiguous()


def _with_nan(
    codes: torch.Tensor, scales: torch.Tensor, scale_rows: int
) -> tuple[torch.Tensor, int]:
    """The scales of e4m3 codes, with NaN for outputs that have the code of NaN.

    The kernels read this code as a number.
    """
    is_nan = (codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F).any(-1)
    if not is_nan.any():
        return scales, scale_rows
    expanded = _expand(scales, scale_rows, codes.shape[-2])
    assert expanded is not None
    return expanded.masked_fill(is_nan.unsqueeze(-2), torch.nan), 1


def _padded(codes: torch.Tensor, run: int) -> torch.Tensor:
    """Pad rows to whole runs, contiguous in memory."""
    return F.pad(codes, (0, -codes.shape[-1] % run)).contiguous()


def _in_pairs(codes: torch.Tensor, half: int) -> torch.Tensor:
    """Pack two codes into a byte, in runs of `2 * half` codes."""
    bytes_of_row = _padded(codes, 2 * half) + 8
    *stack, size = bytes_of_row.shape
    low, high = bytes_of_row.view(*stack, size // (2 * half), 2, half).unbind(-2)
    return (low | high << 4).view(*stack, size // 2)


def _by_group(values: torch.Tensor | None) -> torch.Tensor | None:
    """Transpose values to groups first: programs read one group for neighbouring outputs."""
    return None if values is None else values.transpose(-1, -2).contiguous()


def _expand(values: torch.Tensor | None, rows: int, size_out: int) -> torch.Tensor | None:
    """Repeat values to one for each output."""
    if values is None:
        return None
    return values.repeat_interleave(rows, dim=-1)[..., :size_out].contiguous()
