"""Ranks that draw together: each from its part of the logits, in decode graphs.

The ranks are threads of this process, and what their kernels exchange is exchanged at a barrier.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_model
from waiting import LIMIT

from nanovllm import LLM, SamplingParams
from nanovllm.engine.ranks import workers
from nanovllm.engine.ranks.codec import decode, encode
from nanovllm.engine.run.other_ranks import OtherRanks
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.start import startup
from nanovllm.engine.start.placement import resolve_placement
from nanovllm.kernels.plain.sample import sample
from nanovllm.layers.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 2
PROMPTS = [[3, 14, 15], [92, 65], [35, 89, 79, 32], [38]]


class Meeting:
    """Where threads leave tensors for each other. Counts the exchanges of each kind."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=LIMIT)
        self.left: list[torch.Tensor] = [torch.empty(0)] * SIZE
        self.counts: dict[str, int] = {}


class ThreadRanks(Ranks):
    """With kernels that draw. No rows are few enough to be summed by them."""

    def __init__(self, rank: int, meeting: Meeting, together: bool) -> None:
        super().__init__(rank, SIZE)
        self.meeting = meeting
        self.check = lambda: None
        kernels: Any = SimpleNamespace(most_rows=lambda _: 0, sample=self.sample)
        self.peer_kernels = kernels if together else None

    def exchange(self, kind: str, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self.meeting
        meeting.left[self.rank] = x.clone()
        meeting.barrier.wait()
        everyones = list(meeting.left)
        if self.rank == 0:
            meeting.counts[kind] = meeting.counts.get(kind, 0) + 1
        meeting.barrier.wait()
        return everyones

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange("sum", x)).sum(0)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.exchange("broadcast", x)[0])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        everyones = self.exchange("gather", x)
        return torch.cat(everyones, dim=-1) if self.rank == 0 else x

    def minimum(self, number: int) -> int:
        return min(map(int, self.exchange("minimum", torch.tensor(number))))

    def sample(
        self, part: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, first: int
    ) -> torch.Tensor:
        parts = self.exchange("draw", part)
        assert first == sum(each.shape[1] for each in parts[: self.rank])
        return sample(torch.cat(parts, dim=1), temperatures, keys)


class ThreadWorkers(OtherRanks):
    """Rank 1 in a thread."""

    draws_together = True
    shard: Shard

    def __init__(self, size: int, device: str, one_order: bool) -> None:
        assert size == SIZE and not one_order
        self.meeting = Meeting()
        super().__init__(ThreadRanks(0, self.meeting, self.draws_together))
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.connected = threading.Event()

    def start(self, *arguments: Any) -> None:
        self.thread = threading.Thread(target=self.serve, args=arguments, daemon=True)
        self.thread.start()

    def serve(self, config: Any, model_config: Any, path: Path, _: None) -> None:
        ranks = ThreadRanks(1, self.meeting, self.draws_together)
        placement = resolve_placement(config, model_config, ranks)
        shard = startup.load_shard(config, model_config, path, placement)
        self.connected.wait()
        startup.start_shard(shard, config)
        shard.graphs = shard.decode_graphs(len(PROMPTS))
        self.shard = shard
        while message := self.messages.get():
            with shard.computing():
                shard.compute(decode(bytearray(message)))

    def connect(self) -> None:
        self.connected.set()

    @contextmanager
    def step(self, inputs: Any) -> Iterator[None]:
        self.messages.put(encode(inputs))
        yield

    def close(self) -> None:
        self.messages.put(b"")
        self.thread.join(LIMIT)


def drawn(path: Path, params: list[SamplingParams], together: bool) -> tuple[Any, dict[str, int]]:
    """What two ranks draw, and the exchanges of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "Workers", ThreadWorkers)
        patch.setattr(ThreadWorkers, "draws_together", together)
        options = dict(device="cpu", dtype="float32", attention_backend="torch", overlap=True)
        with LLM(path, tensor_parallel_size=2, num_kvcache_blocks=40, **options) as llm:
            runner = llm.model_runner
            runner.shard.graphs = runner.shard.decode_graphs(len(PROMPTS))
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            counts = runner.workers.meeting.counts
    return [(out["token_ids"], out["logprobs"]) for out in outputs], counts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def params_of(**options: Any) -> list[SamplingParams]:
    """A greedy request, and others; the last one has the options."""
    common = dict(max_tokens=9, ignore_eos=True)
    seeded = [SamplingParams(temperature=t, seed=7, **common) for t in (0.0, 1.0, 0.7)]
    return [*seeded, SamplingParams(seed=7, **common | dict(max_tokens=4) | options)]


@pytest.mark.parametrize(
    ("options", "gathers"),
    [({}, 0), (dict(top_k=3), 3), (dict(logprobs=2), 3), (dict(ignore_eos=False, min_tokens=3), 2)],
    ids=["plain", "filters", "logprobs", "filters of the first steps"],
)
def test_tokens_are_those_of_rank_0_alone(
    options: dict[str, Any], gathers: int, path: Path
) -> None:
    """Logits are gathered for steps that need them alone; then tokens are sent to the others."""
    params = params_of(**options)
    alone, counts_alone = drawn(path, params, together=False)
    tokens, counts = drawn(path, params, together=True)
    assert tokens == alone
    prefills = 1
    assert counts_alone["gather"] == 9 and "draw" not in counts_alone
    assert counts["draw"] == 8
    assert counts["gather"] == prefills + gathers
    assert counts["broadcast"] == prefills + gathers
    assert counts_alone["broadcast"] == 8
