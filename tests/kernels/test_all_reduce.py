"""Sums over ranks through shared memory, against their twins.

Interpreted, the ranks are processes whose buffers are shared memory. On a GPU they are threads,
each with a stream.
"""

import dataclasses
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from waiting import LIMIT

from nanovllm.kernels.plain import all_reduce as plain
from nanovllm.kernels.triton.common import INTERPRETED
from nanovllm.kernels.triton.ranks import exchange
from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels
from nanovllm.kernels.triton.ranks.exchange import EMPTY_HALF, buffer_bytes
from nanovllm.kernels.triton.sampling.sample import sample
from nanovllm.layers.ranks import Ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread", "small_buffers"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

EPS = 1e-6
Run = Callable[[PeerKernels], Any]


@pytest.fixture(scope="module")
def small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "REGIONS", 32)
        if INTERPRETED:  # where a read takes a millisecond
            patch.setattr(exchange, "CHECK_SPINS", tl.constexpr(32))
        yield


class Buffers:
    """The memory of all ranks, filled as theirs is."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        num_bytes = size * buffer_bytes(size)
        self.memory = torch.from_numpy(np.full(num_bytes // 2, EMPTY_HALF, np.uint16).view("int16"))
        self.memory = self.memory.to(device) if device != "cpu" else self.memory.share_memory_()
        self.ended = torch.zeros(1, dtype=torch.int32)
        self.ended = self.ended.pin_memory() if device != "cpu" else self.ended.share_memory_()

    def sums(self, rank: int) -> PeerKernels:
        step = buffer_bytes(self.size)
        starts = [self.memory.data_ptr() + other * step for other in range(self.size)]
        places = torch.tensor([*starts, self.ended.data_ptr()], device=self.device)
        counts = torch.zeros(1 + exchange.REGIONS, dtype=torch.int32, device=self.device)
        return PeerKernels(rank, self.size, places, counts)


def on_ranks(buffers: Buffers, run: Run) -> list[Any]:
    """What `run` returns on each rank."""
    if buffers.device != "cpu":

        def on_stream(rank: int) -> Any:
            with torch.cuda.stream(torch.cuda.Stream()):
                result = run(buffers.sums(rank))
                torch.cuda.current_stream().synchronize()
            return result

        with ThreadPoolExecutor(buffers.size) as pool:
            return list(pool.map(on_stream, range(buffers.size)))
    context: Any = multiprocessing.get_context("fork")
    lock = context.Lock()
    pipes = [context.Pipe(duplex=False) for _ in range(buffers.size)]

    def on_rank(rank: int) -> None:
        _let_in_one_at_a_time(lock)
        try:
            pipes[rank][1].send(_numpy(run(buffers.sums(rank))))
        except BaseException as error:
            pipes[rank][1].send(error.__cause__ or error)
            raise

    ranks = [context.Process(target=on_rank, args=(i,)) for i in range(buffers.size)]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + LIMIT
        assert all(end.poll(max(0.0, deadline - time.monotonic())) for end, _ in pipes), "no end"
        results = [end.recv() for end, _ in pipes]
        assert not any(isinstance(result, BaseException) for result in results), results
        return [_tensors(result) for result in results]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _let_in_one_at_a_time(lock: Any) -> None:
    """Interpreted loads and stores of this process wait for those of other ranks.

    The interpreter writes a number of 16 bits as one byte and then both. A rank that read between
    the two would take half a number for a whole one. A GPU writes it at once.
    """
    native = interpreter._interpreter

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with lock:
                return function(*args)

        return run

    native.load, native.store = locked(native.load), locked(native.store)


def _numpy(values: list[torch.Tensor]) -> list[Any]:
    return [value.cpu().numpy() for value in values]


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(value) for value in values]


@dataclasses.dataclass(frozen=True)
class Call:
    """One sum of some kind: its inputs for all ranks, on any device."""

    kind: str
    rows: int
    size: int
    dtype: torch.dtype
    seed: int

    def inputs(self, ranks: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The ranks' addends, or parts of a table; and what follows."""
        generator = torch.Generator().manual_seed(self.seed)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, self.dtype)

        if self.kind == "embedding":
            ids = torch.randint(0, 5 * ranks, (self.rows,), generator=generator)
            return [values(5, self.size) for _ in range(ranks)], [ids.to(device)]
        parts = [values(self.rows, 2 * self.size)[:, : self.size] for _ in range(ranks)]
        if self.kind == "all_reduce":
            return parts, []
        return parts, [values(self.rows, self.size), values(self.size)]

    def run(self, sums: PeerKernels) -> list[torch.Tensor]:
        """On one rank."""
        parts, rest = self.inputs(sums.size, str(sums.places.device))
        mine = parts[sums.rank]
        if self.kind == "embedding":
            return [sums.embedding(rest[0], mine, 5 * sums.rank)]
        if self.kind == "all_reduce":
            return [sums.all_reduce(mine)]
        return normed(getattr(sums, self.kind)(mine, *rest, EPS))

    def expected(self, ranks: int) -> list[torch.Tensor]:
        parts, rest = self.inputs(ranks, "cpu")
        if self.kind == "embedding":
            return [plain.embedding(rest[0], parts)]
        if self.kind == "all_reduce":
            return [plain.all_reduce(parts)]
        return normed(getattr(plain, self.kind)(parts, *rest, EPS))


def normed(result: Any) -> list[torch.Tensor]:
    """The rounded sum, and the norm."""
    first, second = result
    return [second, first] if isinstance(second, torch.Tensor) else [first, second.normed()]


def calls(number: int, dtype: torch.dtype, seed: int) -> list[Call]:
    """Calls of all kinds and sizes in any order, as programs of different kernels share regions."""
    choose = random.Random(seed)
    kinds = ("all_reduce", "embedding", "add_rms_norm", "add_scaled")
    return [
        Call(
            choose.choice(kinds),
            choose.choice((1, 2, 5)),
            choose.choice((8, 100, 1100, 2560)),
            dtype,
            i,
        )
        for i in range(number)
    ]


@pytest.mark.parametrize(
    ("size", "dtype", "number"),
    [
        (2, torch.float32, 24),
        (2, torch.float16, 24),
        (2, torch.bfloat16, 24),
        (3, torch.float32, 12),
        (8, torch.float16, 4),
    ],
)
def test_sums_equal_their_twins_on_all_ranks(
    size: int, dtype: torch.dtype, number: int, kernel_device: str
) -> None:
    """Ranks that wait at random for each other: a slot that is written too early would show."""
    if dtype == torch.bfloat16 and kernel_device == "cpu":
        pytest.skip("the processes exchange results as NumPy arrays, which have no bfloat16")
    made = calls(number, dtype, seed=size)
    buffers = Buffers(size, kernel_device)

    def run(sums: PeerKernels) -> list[torch.Tensor]:
        delays, results = random.Random(sums.rank), []
        for call in made:
            if delays.random() < 0.5 and kernel_device == "cpu":
                time.sleep(0.02 * delays.random())
            results += call.run(sums)
        return results

    first, *others = on_ranks(buffers, run)
    expected = [(call.kind, value) for call in made for value in call.expected(size)]
    for mine, (kind, value) in zip(first, expected, strict=True):
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}.get(value.dtype, 1.6e-2)
        if kind in ("all_reduce", "embedding"):  # bit for bit: with one order, others sum many rows
            tolerance = 0.0
        torch.testing.assert_close(mine.cpu(), value, rtol=tolerance, atol=tolerance)
    for other in others:
        assert all(map(torch.equal, first, other)), "ranks have different sums"
    assert (buffers.memory == EMPTY_HALF - (1 << 16)).all(), "something is left in a slot"


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 3000), (3, 1100), (4, 5)])
def test_ranks_draw_what_one_would_of_the_same_logits(
    size: int, vocab_size: int, kernel_device: str
) -> None:
    """Bit for bit, greedy rows and others; of equal logits on two ranks, the first wins."""
    rows, columns = 6, -(-vocab_size // size)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator)
    logits[0] = 1.0
    logits[1, [1, vocab_size - 1]] = 9.0
    logits[2, :-1] = -torch.inf
    logits[3] = torch.nan
    temperatures = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.7, 100.0])
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)

    def run(sums: PeerKernels) -> list[torch.Tensor]:
        first = min(columns * sums.rank, vocab_size)
        part = logits[:, first : first + columns].to(kernel_device)
        options = temperatures.to(kernel_device), keys.to(kernel_device)
        return [sums.sample(part, *options, first) for _ in range(3)]

    inputs = [x.to(kernel_device) for x in (logits, temperatures, keys)]
    expected = sample(*inputs)
    assert expected[1] == 1 and expected[2] == vocab_size - 1
    for drawn in on_ranks(Buffers(size, kernel_device), run):
        assert all(torch.equal(tokens, expected) for tokens in drawn)


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.float32, torch.int32), (torch.float16, torch.int16)]
)
def test_numbers_that_mark_empty_places_are_sent_as_zeros(
    dtype: torch.dtype, word: torch.dtype, kernel_device: str
) -> None:
    """Negative zero in 16 bits, a number of 4e-41 in 32. NaN and infinity are sent as they are."""
    empty = -(1 << 15) if word == torch.int16 else 0x80008000 - (1 << 32)
    special = torch.tensor([[empty] * 2], dtype=word).view(dtype)
    x = torch.cat([special, torch.tensor([[0.0, -0.0, 1.0, torch.inf, torch.nan]], dtype=dtype)], 1)
    others = torch.tensor([[0.0, 2.0, -0.0, -0.0, 1.0, 1.0, 1.0]], dtype=dtype)

    def run(sums: PeerKernels) -> list[torch.Tensor]:
        mine = others if sums.rank else x
        return [sums.all_reduce(mine.to(sums.places.device))]

    expected = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0, torch.inf, torch.nan]], dtype=dtype)
    for (total,) in on_ranks(Buffers(2, kernel_device), run):
        torch.testing.assert_close(total.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_kernel_ends_although_another_rank_does_not_come(kernel_device: str) -> None:
    """A rank that has ended is reported in memory, which waiting kernels read.

    What was sent before is not overwritten by the next exchange: the other rank might still read.
    """
    buffers = Buffers(2, kernel_device)
    buffers.ended.fill_(1)
    sums = buffers.sums(0)
    for number in (1.0, 2.0):
        sums.all_reduce(torch.full((2, 8), number, device=kernel_device))
    others = buffers.memory.cpu().view(2, -1)[1].view(torch.float32)
    assert (others == 1.0).sum() == (others == 2.0).sum() == 16


def test_only_the_first_kernel_waits_for_a_rank_that_has_ended(kernel_device: str) -> None:
    """Else a step would wait once for each of its sums: seconds for a large model."""
    buffers = Buffers(2, kernel_device)
    buffers.ended.fill_(1)
    sums = buffers.sums(0)
    sums.all_reduce(torch.ones(2, 8, device=kernel_device))
    assert sums.counts[0].item() == 1
    buffers.ended.fill_(0)
    sums.all_reduce(torch.ones(2, 8, device=kernel_device)).cpu()


@pytest.mark.parametrize(
    ("size", "columns", "most_rows"), [(2, 1024, 32), (2, 8192, 32), (8, 8192, 4), (2, 8193, 0)]
)
def test_as_many_rows_are_taken_as_fit_and_are_faster(
    size: int, columns: int, most_rows: int
) -> None:
    """Regions limit the rows, and what a rank may send, which more ranks make more."""
    ranks = Ranks(0, size)
    ranks.peer_kernels = PeerKernels(0, size, torch.empty(0), torch.empty(0), 32 << 14)
    row = torch.empty(1, columns, dtype=torch.bfloat16)
    taken = [rows for rows in range(100) if ranks.few(rows, row)]
    assert taken == list(range(1, most_rows + 1))
