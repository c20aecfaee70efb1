"""Sums of ranks on GPUs in one order. Here gloo carries what NCCL carries there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed
from waiting import LIMIT

from nanovllm.engine.ranks import nccl_ranks
from nanovllm.engine.ranks.nccl_ranks import NcclRanks
from nanovllm.kernels.plain.all_reduce import all_reduce

T = TypeVar("T")
dist: Any = torch.distributed


@pytest.fixture(autouse=True)
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(rank: int, size: int, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT)
        return dist.ProcessGroupGloo(store, rank, size, options)

    monkeypatch.setattr(nccl_ranks, "_nccl", group)


def on_ranks(size: int, run: Callable[[NcclRanks], T]) -> list[T]:
    """What `run` returns on each rank. Ranks are threads, with sums in one order."""
    device = torch.device("cpu")
    first = NcclRanks(0, size, device, one_order=True)
    others = [NcclRanks(i, size, device, first.address, one_order=True) for i in range(1, size)]

    def on_rank(ranks: NcclRanks) -> T:
        ranks.connect()
        return run(ranks)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(on_rank, ranks) for ranks in (first, *others)]
        return [future.result(timeout=LIMIT) for future in futures]


def addends(size: int, rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of all ranks. Sums of three depend on the order, also in float32: two nearly cancel out."""
    generator = torch.Generator().manual_seed(size)
    values = torch.rand(size, rows, columns, generator=generator) * 1e-3
    if size > 2:
        values[1] = 3e4 + values[1] * 1e7
        values[2] = -values[1]
    values[:, 0, 0] = -0.0
    return [*values.to(dtype)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_any_size_have_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    """Bit for bit what the kernels between GPUs compute of few rows, for each row."""
    parts = addends(size, 40, 24, dtype)
    expected = bits(all_reduce(parts))
    assert size == 2 or not torch.equal(expected, bits(all_reduce(parts[::-1])))
    cuts = [slice(0, 40), slice(0, 0), *(slice(row, row + 1) for row in (0, 39)), slice(3, 10)]

    def run(ranks: NcclRanks) -> list[torch.Tensor]:
        sums = [ranks.all_reduce(parts[ranks.rank][cut].clone()) for cut in cuts]
        return [*sums, ranks.all_reduce(parts[ranks.rank].clone()[:, 1:6])]  # 200 numbers: uneven

    for totals in on_ranks(size, run):
        for cut, total in zip(cuts, totals, strict=False):
            assert torch.equal(bits(total), expected[cut])
        assert torch.equal(bits(totals[-1]), expected[:, 1:6])


def test_layers_take_no_sum_that_few_rows_alone_would_have() -> None:
    """Kernels between GPUs add up few rows; those fused with a norm round them once less."""
    taken = []

    def all_reduce_few(x: torch.Tensor) -> torch.Tensor:
        taken.append(len(x))
        return x

    def run(ranks: NcclRanks) -> None:
        kernels: Any = SimpleNamespace(most_rows=lambda _: 4, all_reduce=all_reduce_few)
        ranks.peer_kernels = kernels
        for rows in (1, 4, 5):
            x = torch.ones(rows, 8)
            assert ranks.few(rows, x) is None
            ranks.all_reduce(x)

    on_ranks(2, run)
    assert sorted(taken) == [1, 1, 4, 4]
