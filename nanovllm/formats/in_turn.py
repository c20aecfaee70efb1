"""Stacks of experts' tensors that have a row of each projection in turn: gate, up, gate, up.

Here, the rows of each projection are together, as the kernels read them.
"""

from collections.abc import Iterator, Mapping

import torch

from nanovllm.formats.block_format import EXPONENT, BlockFormat
from nanovllm.formats.dummy_values import constant, integers
from nanovllm.formats.format import Dense, Weight, WeightFormat
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import (
    COLUMNS,
    ROWS,
    Axis,
    Loaded,
    RankPart,
    Stored,
    StoredTensor,
    copy_into,
)

NOT_A_NUMBER = 255  # a block's scale


def rows_in_turn(part: RankPart) -> Iterator[tuple[int, slice]]:
    """Each projection, and the place of this rank's rows of it in the checkpoint's tensor."""
    count = len(part.sizes)
    for i, rows in enumerate(part.rows):
        yield i, slice(count * rows.start + i, count * rows.stop, count)


def load_in_turn(part: RankPart, stored: Stored, target: torch.Tensor, loaded: Loaded) -> None:
    """Fill `target`, a rank's tensor of all projections, from a tensor that has them in turn."""
    size = part.stored_size(stored)
    shape, parts = stored.shape(size), part.split(stored, target)
    for i, rows in rows_in_turn(part):
        index = stored.index(slice(0, 0), part.columns, size)
        index = (rows, *index[1:])
        to = parts[i]
        if isinstance(stored, StoredTransposed):
            to, index = to.t(), index[::-1]
        copy_into(to, loaded, shape, index)


class StoredTransposed(Stored):
    """A matrix that files have as [in, out]."""

    def shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return super().shape(size)[::-1]


class InTurn(WeightFormat):
    """A format of stacks with the projections in turn."""

    def load(
        self,
        param: StoredTensor,
        target: torch.Tensor,
        loaded: Loaded,
        projection: int | None,
        tensors: Mapping[str, torch.Tensor],  # noqa: ARG002
    ) -> None:
        assert projection is None
        load_in_turn(param.rank_part, param.stored, target, loaded)


class DenseInTurn(InTurn, Dense):
    """Plain weights [in, out] of experts, with the outputs of the projections in turn."""

    def __init__(self) -> None:
        self._tensors = {"weight": StoredTransposed((ROWS, COLUMNS))}


class MxFormat(InTurn, BlockFormat):
    """MXFP4 of experts: the values [out, in / 32, 16] and the scales [out, in / 32] of blocks.

    Rows of the projections are in turn. A block becomes one of GGUF's type, which has its scale
    first, and value i next to value i + 16.
    """

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)
        blocks, num_bytes = Axis(of_rows=False, unit=self.kind.size), self.kind.num_bytes - 1
        self._tensors = {
            "weight_blocks": Stored((ROWS, blocks, num_bytes), torch.uint8, fill=integers),
            "weight_scales": Stored((ROWS, blocks), torch.uint8, fill=constant(EXPONENT)),
        }

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> Weight:
        pairs, scales = (tensors[f"weight_{name}"].detach() for name in ("blocks", "scales"))
        if bool((scales == NOT_A_NUMBER).any()):
            raise ValueError(f"a scale of MXFP4 is {NOT_A_NUMBER}, which stands for no number")
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
        first, second = codes.chunk(2, dim=-1)
        joined = torch.cat([scales.unsqueeze(-1), first | second << 4], dim=-1)
        return super().weight({"weight": joined}, part)
