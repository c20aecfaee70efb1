"""Commands to all ranks: results, errors, dead ranks, and steps before and after."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nanovllm import LLM, RankError, SamplingParams
from nanovllm.engine.ranks import answers
from nanovllm.engine.ranks.channel import CAPACITY
from nanovllm.engine.ranks.codec import encode, pack, unpack
from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Call(NamedTuple):
    """A command that calls a function of the shard."""

    function: Callable[[Shard], Any]

    def run(self, shard: Shard) -> Any:
        return self.function(shard)


class Data(NamedTuple):
    """A command with data."""

    data: bytes

    def run(self, shard: Shard) -> int:
        return len(self.data) + shard.ranks.rank


def make_llm(path: Path, size: int = 2) -> LLM:
    return LLM(
        path, device="cpu", dtype="float32", cpu_kvcache_gib=0.02, max_model_len=64,
        tensor_parallel_size=size,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    """Two ranks, which no test of those that use them ends."""
    with make_llm(model_dir) as llm:
        yield llm


def generate(llm: LLM) -> list[int]:
    (output,) = llm.generate([[3, 14, 15]], GREEDY, use_tqdm=False)
    return list(output["token_ids"])


def test_a_single_rank_runs_a_command(model_dir: Path) -> None:
    with make_llm(model_dir, 1) as llm:
        assert llm.model_runner.everywhere(Call(lambda shard: shard.ranks.size)) == [1]
        with pytest.raises(KeyError) as caught:
            llm.model_runner.everywhere(Call(lambda _: {}["mine"]))
        assert not hasattr(caught.value, "__notes__")


class Launch(NamedTuple):
    """Launches what may end later."""

    waits_for_device: bool

    def run(self, shard: Shard) -> None:
        pass


@pytest.mark.parametrize("waits", [True, False])
def test_a_command_may_leave_its_work_to_the_device(
    waits: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    with make_llm(model_dir, size=1) as llm:
        monkeypatch.setattr(llm.model_runner.shard, "synchronize", lambda: waited.append(True))
        llm.model_runner.everywhere(Launch(waits))
        assert waited == [True] * waits


def test_results_come_in_the_order_of_ranks(llm: LLM) -> None:
    before = generate(llm)
    assert llm.model_runner.everywhere(Call(lambda shard: (shard.ranks.rank, "x"))) == [
        (0, "x"),
        (1, "x"),
    ]
    assert generate(llm) == before


def test_functions_of_the_caller_need_not_be_importable(llm: LLM) -> None:
    """Here a closure; scripts have functions in a module that ranks do not run."""
    pytest.importorskip("cloudpickle")
    factor = 3
    assert llm.model_runner.everywhere(Call(lambda s: s.ranks.rank * factor)) == [0, 3]


def test_data_may_be_larger_than_the_ring_and_results_larger_than_a_socket(llm: LLM) -> None:
    data = bytes(2 * CAPACITY + 5)
    assert llm.model_runner.everywhere(Data(data)) == [len(data), len(data) + 1]

    def large(shard: Shard) -> torch.Tensor:
        return torch.full((1 << 20,), shard.ranks.rank)

    results = llm.model_runner.everywhere(Call(large))
    assert [int(result.sum()) for result in results] == [0, 1 << 20]


def test_ranks_may_exchange_in_a_command(llm: LLM) -> None:
    def total(shard: Shard) -> float:
        return float(shard.ranks.all_reduce(torch.ones(1)))

    assert llm.model_runner.everywhere(Call(total)) == [2.0, 2.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_raised_as_itself_and_names_its_rank(rank: int, llm: LLM) -> None:
    before = generate(llm)

    def fail(shard: Shard) -> None:
        if shard.ranks.rank == rank:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        llm.model_runner.everywhere(Call(fail))
    (note,) = caught.value.__notes__
    assert note.startswith("raised by rank 0" if rank == 0 else "raised by rank 1 of 2:")
    assert ("in fail" in note) == (rank == 1), "its traceback"
    assert generate(llm) == before


def test_what_cannot_be_sent_is_an_error_that_says_so(llm: LLM) -> None:
    def lock(shard: Shard) -> Any:
        return threading.Lock() if shard.ranks.rank else None

    with pytest.raises(RuntimeError, match="a result cannot be sent to rank 0"):
        llm.model_runner.everywhere(Call(lock))

    class MineError(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    def fail(shard: Shard) -> None:
        if shard.ranks.rank:
            raise MineError(1, 2)

    with pytest.raises(RuntimeError, match="MineError: 1 and 2"):
        llm.model_runner.everywhere(Call(fail))
    lock_command = Call(threading.Lock())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        llm.model_runner.everywhere(lock_command)
    assert llm.model_runner.everywhere(Data(b"")) == [0, 1]


def test_a_command_runs_between_steps(llm: LLM) -> None:
    expected = generate(llm)
    request_id = llm.add_request([3, 14, 15], GREEDY)
    outputs = []
    while not outputs:
        outputs = llm.step()
        assert llm.model_runner.everywhere(Data(b"1")) == [1, 2]
    assert (outputs[0]["request_id"], outputs[0]["token_ids"]) == (request_id, expected)


def test_a_rank_that_dies_in_a_command_raises_rank_error(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            llm.model_runner.everywhere(
                Call(lambda shard: shard.ranks.rank and os.kill(os.getpid(), signal.SIGKILL))
            )
        with pytest.raises(RankError):
            llm.model_runner.everywhere(Data(b""))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_lost_step_are_ended(
    rank: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank raises; the other waits for it in an exchange."""
    monkeypatch.setattr(answers, "LOST_SECONDS", 0.05)

    def exchange(shard: Shard) -> None:
        if shard.ranks.rank == rank:
            raise ValueError("alone")
        shard.ranks.all_reduce(torch.ones(1))

    message = f"rank {rank}.* raised ValueError in a command"
    with make_llm(model_dir) as llm, pytest.raises(RankError, match=message):
        llm.model_runner.everywhere(Call(exchange))


def test_ctrl_c_waits_for_the_end_of_a_command(llm: LLM) -> None:
    before = generate(llm)

    def interrupted(shard: Shard) -> None:
        if shard.ranks.rank == 0:
            signal.raise_signal(signal.SIGINT)
        shard.ranks.all_reduce(torch.ones(1))  # for which the other rank waits

    with pytest.raises(KeyboardInterrupt):
        llm.model_runner.everywhere(Call(interrupted))
    assert generate(llm) == before


def test_steps_and_commands_are_told_apart() -> None:
    changes = TableChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))
    step = StepInputs(num_seqs=1, width=0, changes=changes)
    assert unpack(bytearray(encode(step))) is None
    assert unpack(bytearray(pack(Data(b"x")))) == Data(b"x")
