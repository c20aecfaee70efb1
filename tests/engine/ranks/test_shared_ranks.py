"""Exchanges through shared memory: sums and gathers of any size, the same on every rank.

Threads where values matter, processes where timing does: a race would show in thousands of
exchanges of tensors that every rank can draw for all of them.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from waiting import LIMIT, wait_until

from nanovllm.engine.ranks import shared_ranks
from nanovllm.engine.ranks.shared_ranks import SharedRanks

pytestmark = pytest.mark.usefixtures("one_thread")

T = TypeVar("T")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
SMALL_SLOT = 1024  # bytes, so that tensors have many pieces


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ranks, "SLOT_BYTES", SMALL_SLOT)
    monkeypatch.setattr(shared_ranks, "SPLIT_BYTES", SMALL_SLOT // 2)


@contextmanager
def joined(size: int) -> Iterator[list[SharedRanks]]:
    """All ranks in one process, each with its own mapping of the memory."""
    first = SharedRanks(0, size)
    others = [SharedRanks(rank, size, os.dup(first.address)) for rank in range(1, size)]
    yield [first, *others]
    for ranks in (first, *others):
        ranks.close()


def on_ranks(size: int, run: Callable[[SharedRanks], T]) -> list[T]:
    """What `run` returns on each rank, in one thread for each."""
    with joined(size) as ranks, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, one) for one in ranks]
        return [future.result(timeout=LIMIT) for future in futures]


def draw(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return torch.randint(-(1 << 60), 1 << 60, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """By definition: in order, in float32 at least, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got, expected)


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_sums_are_exact_and_equal_on_all_ranks(
    size: int, dtype: torch.dtype, small_slots: None
) -> None:
    """One number to several pieces: whole slots, one number more, lengths that no size divides.

    With three ranks a float sum depends on its order, and a 16-bit sum on where it is rounded.
    """
    room = SMALL_SLOT // dtype.itemsize
    for length in (1, 2, 7, room // 2, room - 1, room, room + 1, 3 * room - 1, 5 * room + 12):
        parts = [draw(dtype, length, seed=10 * length + rank) for rank in range(size)]
        sums = on_ranks(size, lambda ranks: ranks.all_reduce(parts[ranks.rank].clone()))  # noqa: B023
        for total in sums:
            assert_equal(total, sum_of(parts))


@pytest.mark.parametrize("length", [1, 5, SMALL_SLOT // 8, SMALL_SLOT])
@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_sends_the_first_ranks_tensor(size: int, length: int, small_slots: None) -> None:
    parts = [draw(torch.int64, length, seed=rank) for rank in range(size)]
    for got in on_ranks(size, lambda ranks: ranks.broadcast(parts[ranks.rank].clone())):
        assert_equal(got, parts[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_gather_joins_the_rows_of_all_ranks(
    size: int, dtype: torch.dtype, small_slots: None
) -> None:
    """Many rows fit into a slot, exactly one, or not even one."""
    room = SMALL_SLOT // dtype.itemsize
    for shape in ((1, 1), (5, 3), (300, 7), (3, room), (2, room - 1), (3, room + 1), (2, 3 * room)):
        parts = [draw(dtype, *shape, seed=rank) for rank in range(size)]
        got = on_ranks(size, lambda ranks: ranks.gather(parts[ranks.rank]))  # noqa: B023
        assert_equal(got[0], torch.cat(parts, dim=-1))
        assert all(own is part for own, part in zip(got[1:], parts[1:], strict=True))


def test_views_are_exchanged_like_whole_tensors(small_slots: None) -> None:
    """Transposed and sliced tensors."""
    parts = [draw(torch.float32, 40, 30, seed=rank) for rank in range(2)]

    def run(ranks: SharedRanks) -> list[torch.Tensor]:
        mine = parts[ranks.rank]
        return [
            ranks.all_reduce(mine.clone().t()), ranks.all_reduce(mine.clone()[:, 3:17]),
            ranks.gather(mine.t()), ranks.gather(mine[1:, 3:17]),
            ranks.gather(mine.view(4, 10, 30)),
        ]  # fmt: skip

    whole, total = torch.cat(parts, dim=1), sum_of(parts)
    by_rank = on_ranks(2, run)
    for sums in by_rank:
        assert_equal(sums[0], total.t())
        assert_equal(sums[1], total[:, 3:17])
    transposed, cut, deep = by_rank[0][2:]
    assert_equal(transposed, torch.cat([part.t() for part in parts], dim=1))
    assert_equal(cut, torch.cat([part[1:, 3:17] for part in parts], dim=1))
    assert_equal(deep, whole.view(4, 10, 2, 30).flatten(2))


@pytest.mark.parametrize("size", [2, 3])
def test_least_is_the_minimum_of_all_ranks(size: int) -> None:
    numbers = [[5, 3, 9], [1 << 60, (1 << 60) + 1, 1 << 61], [-1, 0, 1]]
    for least in on_ranks(size, lambda ranks: [ranks.minimum(n[ranks.rank]) for n in numbers]):
        assert least == [min(n[:size]) for n in numbers]


def test_infinities_nans_and_empty_tensors_are_summed() -> None:
    """Infinities that cancel out, NaN, and no numbers at all."""
    parts = [torch.tensor([torch.inf, 1.0, torch.nan]), torch.tensor([-torch.inf, torch.inf, 1.0])]
    for total in on_ranks(2, lambda ranks: ranks.all_reduce(parts[ranks.rank].clone())):
        assert total.isnan().tolist() == [True, False, True] and total[1] == torch.inf
    for total in on_ranks(2, lambda ranks: ranks.all_reduce(torch.empty(0, 7))):
        assert total.shape == (0, 7)


# Between processes

PEER = """
import sys
sys.path[:0] = sys.argv[4:]  # of this module, and of what it imports
from test_shared_ranks import SharedRanks, {name}
rank, size, address = map(int, sys.argv[1:4])
{name}(SharedRanks(rank, size, address))
"""


@contextmanager
def peers(
    size: int, run: Callable[[SharedRanks], object]
) -> Iterator[tuple[SharedRanks, list["subprocess.Popen[bytes]"]]]:
    """Rank 0 of several; the others are processes that `run` a function of this module."""
    code = PEER.format(name=run.__name__)
    ranks = SharedRanks(0, size)
    folder = Path(__file__).parent
    arguments = [str(size), str(ranks.address), str(folder), str(folder.parents[1])]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), *arguments], pass_fds=ranks.fds)
        for rank in range(1, size)
    ]

    def check() -> None:
        if any(process.poll() is not None for process in processes):
            raise KeyError("a peer has ended")

    ranks.check = check
    try:
        yield ranks, processes
        if run is not add_forever:
            assert [process.wait(LIMIT) for process in processes] == [0] * (size - 1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        ranks.close()


def exchange_at_random(ranks: SharedRanks) -> None:
    """Thousands of exchanges, each checked against its definition; all ranks draw the same tensors.

    Sizes vary from one number to several pieces, and now and then a rank is late.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(ranks.size)
    source = torch.randn(ranks.size, 1 << 20, generator=generator)

    def number(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    for turn in range(4000 // ranks.size):
        dtype = DTYPES[number(4)]
        length = 1 + number((8, 500, 3000, 600_000 if turn % 20 == 0 else 20_000)[number(4)])
        start = number(1 << 10)
        parts = list((source[:, start : start + length] * 50).to(dtype))
        mine = parts[ranks.rank].clone()
        if number(100) == ranks.rank:
            time.sleep(1e-3)
        if number(3):
            assert_equal(ranks.all_reduce(mine), sum_of(parts))
        else:
            whole = ranks.gather(mine.view(1, -1))
            if ranks.rank == 0:
                assert_equal(whole, torch.cat(parts).view(1, -1))
        assert ranks.minimum(turn + ranks.rank) == turn


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_thousands_of_exchanges_between_processes(size: int) -> None:
    """There may be more ranks than cores."""
    with peers(size, exchange_at_random) as (ranks, _):
        exchange_at_random(ranks)


def add_forever(ranks: SharedRanks) -> None:
    x = torch.zeros(100_000)
    while True:
        ranks.all_reduce(x)


@pytest.mark.slow
def test_a_killed_peer_ends_an_exchange_with_an_error() -> None:
    """At three different moments."""
    for turn in range(3):
        with peers(3, add_forever) as (ranks, processes):
            x = torch.zeros(100_000)
            ranks.all_reduce(x)  # they are there
            killer = threading.Timer(0.05 + turn * 1e-3, processes[turn % 2].kill)
            killer.start()
            with pytest.raises(KeyError, match="a peer has ended"):
                add_forever(ranks)
            killer.join()


def test_waiting_takes_little_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a late one soon sleeps between its checks."""
    done: list[str] = []

    def nap(seconds: float) -> None:
        done.append("nap")
        time.sleep(seconds)

    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=nap)
    monkeypatch.setattr(shared_ranks, "time", clock)
    monkeypatch.setattr(os, "sched_yield", lambda: done.append("look"))
    with joined(2) as (one, other), ThreadPoolExecutor(1) as pool:
        one.check = lambda: done.append("check")
        got = pool.submit(one.minimum, 1)
        wait_until("the rank never sleeps", lambda: done.count("nap") > 10)
        assert done[done.index("check") :][:20] == ["check", "nap"] * 10
        other.minimum(2)
        assert got.result(timeout=LIMIT) == 1


def test_no_file_descriptor_or_memory_is_left_behind() -> None:
    def there() -> list[Any]:
        maps = Path("/proc/self/maps").read_text().count("memfd:nanovllm")
        return [sorted(os.listdir(p)) for p in ("/dev/shm", "/proc/self/fd")] + [maps]  # noqa: PTH208

    before = there()
    on_ranks(3, lambda ranks: ranks.all_reduce(torch.zeros(1_000_000)))
    assert there() == before
