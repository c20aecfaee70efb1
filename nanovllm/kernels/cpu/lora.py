"""Add adapters (low-rank products) on the CPU. Sizes are named as in `plain/lora.py`.

A row's result depends only on the row. PyTorch's products are not used: products of few rows take
longer to prepare than to compute. Products of more than 100 rows would be faster in `lora_down`
with AMX, in bfloat16, but only by about a tenth of the layer's own time.
"""

import functools
from typing import NamedTuple

import torch

from nanovllm.kernels.cpu.library import address, constant, function
from nanovllm.kernels.operands.low_rank import LowRank


class RowBlocks(NamedTuple):
    """The rows of each group in blocks, in the layout of lora.h, and the number of all rows."""

    blocks: torch.Tensor  # int32
    num_rows: int


def group_rows(group_ids: torch.Tensor, num_groups: int) -> RowBlocks:
    """Find the rows of each group once for a step; ids outside [0, num_groups) have no group."""
    assert group_ids.dtype == torch.int32
    group_ids = group_ids.contiguous()
    num_rows, block_rows = len(group_ids), constant("block_rows")
    most = num_rows // block_rows + min(num_rows, num_groups)  # a group has one partial block
    blocks = group_ids.new_empty(1 + most * (1 + block_rows))
    function("group_rows")(group_ids.data_ptr(), num_rows, num_groups, blocks.data_ptr())
    return RowBlocks(blocks, num_rows)


def lora_down(x: torch.Tensor, weights: LowRank, groups: RowBlocks) -> torch.Tensor:
    """As the plain definition, in one part. Reads A once for up to 4 rows of a group."""
    a, ranks, num_rows = weights.a, weights.ranks, groups.num_rows
    assert x.dtype == a.dtype and x.stride(1) == 1 and a.is_contiguous() and ranks.is_contiguous()
    down = x.new_empty(1, num_rows, a.shape[1])
    function("lora_down", a.dtype)(
        x.data_ptr(), x.stride(0), num_rows // max(1, len(x)), a.data_ptr(), ranks.data_ptr(),
        groups.blocks.data_ptr(), len(weights.sizes), weights.max_rank, a.shape[2],
        down.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return down


def lora_up(
    down: torch.Tensor,
    weights: LowRank,
    groups: RowBlocks,
    out: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    """As the plain definition, for one part. Reads B once for up to 4 rows of a group."""
    b, ranks, sizes = weights.b, weights.ranks, weights.sizes
    assert len(down) == 1 and down.dtype == b.dtype and out.dtype in (b.dtype, torch.float32)
    assert down.is_contiguous() and b.is_contiguous() and ranks.is_contiguous()
    assert out.stride(1) == 1
    assert shares is None or shares.dtype == torch.float32
    shares = None if shares is None else shares.contiguous()
    function("lora_up", b.dtype)(
        down.data_ptr(), b.data_ptr(), ranks.data_ptr(), groups.blocks.data_ptr(),
        _ends(sizes).data_ptr(), len(sizes), weights.max_rank, address(shares), out.data_ptr(),
        out.stride(0), out.dtype == torch.float32, torch.get_num_threads(),
    )  # fmt: skip


@functools.cache
def _ends(sizes: tuple[int, ...]) -> torch.Tensor:
    """The end of each projection's columns."""
    return torch.tensor(sizes).cumsum(0)
