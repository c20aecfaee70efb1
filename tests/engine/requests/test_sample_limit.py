"""Samples of one request leave places to other requests."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from audits import audit_scheduler

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.sample_limit import PATIENCE, limit_samples
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

PLACES, BUDGET = 16, 64
SHARE = PLACES // 4


class Requests:
    """A scheduler without a model, for `PLACES` sequences."""

    def __init__(self, num_blocks: int = 1000, **options: Any) -> None:
        sizes = dict(kvcache_block_size=4, max_num_batched_tokens=BUDGET, max_num_seqs=PLACES)
        config = Config("m", overlap=False, **sizes, **options)
        self.scheduler = Scheduler(EngineConfig.settle(config, num_blocks, 400))
        self._fresh = itertools.count()

    def add(self, num_tokens: int, n: int = 1, **params: Any) -> list[Sequence]:
        """Queue a request; returns its samples."""
        asked = SamplingParams(n=n, ignore_eos=True, **params)
        prompt = [next(self._fresh) for _ in range(num_tokens)]  # no shared blocks
        seqs = [Sequence(prompt, asked, index=index, max_model_len=400) for index in range(n)]
        if n > SHARE:
            limit_samples(seqs, PLACES, SHARE)
        seqs[0].siblings = seqs[1:]
        self.scheduler.add(seqs[0])
        return seqs

    def step(self) -> list[Sequence]:
        """Run a step; returns the sequences that it computed, forks among them."""
        batch = self.scheduler.schedule()
        assert batch is not None
        self.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
        audit_scheduler(self.scheduler)
        return batch.all_seqs

    def drain(self) -> None:
        """Run until all requests have finished."""
        while not self.scheduler.is_finished():
            self.step()


class Queue(deque[Sequence]):
    """Counts how many of its sequences are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Sequence]:
        for seq in super().__iter__():
            self.num_read += 1
            yield seq


def num_running(samples: list[Sequence]) -> int:
    return sum(seq.status is SequenceStatus.RUNNING for seq in samples)


@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed"])
def test_next_to_others_samples_have_a_share_of_the_places(scheduling: str) -> None:
    """As many at any time, until the last one has begun; and all of them finish."""
    requests = Requests(scheduling=scheduling)
    chat = requests.add(3, max_tokens=200)
    requests.step()
    samples = requests.add(9, 5 * SHARE, max_tokens=10)
    numbers = []
    while any(seq.finish_reason is None for seq in samples):
        requests.step()
        numbers.append(num_running(samples))
    assert max(numbers) == SHARE and chat[0].finish_reason is None
    assert sum(numbers) > 5 * SHARE * 8, "ended samples are replaced"
    requests.drain()


def test_alone_samples_have_all_places() -> None:
    requests = Requests()
    samples = requests.add(9, 3 * PLACES, max_tokens=10)
    requests.step()
    assert num_running(samples) == PLACES
    requests.drain()


def test_a_prompt_keeps_no_more_places_than_its_samples_may_have() -> None:
    """Others begin while a long prompt of many samples is computed, before and after them."""
    requests = Requests()
    samples = requests.add(3 * BUDGET + 40, 3 * PLACES, max_tokens=10)
    assert requests.step() == samples[:1]
    others = [requests.add(3, max_tokens=50)[0] for _ in range(PLACES)]
    for _ in range(5):
        requests.step()
    assert (num_running(samples), num_running(others)) == (SHARE, PLACES - SHARE)
    requests.drain()


def test_blocks_are_reserved_only_for_samples_that_may_run() -> None:
    """A prompt with many samples is not refused for blocks that they need later, in turns."""
    requests = Requests(num_blocks=60)
    requests.add(3, max_tokens=200)
    requests.step()
    samples = requests.add(40, 3 * PLACES, max_tokens=30)
    requests.step()
    assert num_running(samples) == SHARE
    requests.drain()


def test_requests_of_this_kind_divide_the_places() -> None:
    """None of them is empty; and with a third request each has less."""
    requests = Requests()
    first, second = (requests.add(9, 3 * PLACES, max_tokens=10) for _ in range(2))
    requests.step()
    assert (num_running(first), num_running(second)) == (PLACES // 2, PLACES // 2)
    chat = requests.add(3, max_tokens=50)
    while chat[0].status is not SequenceStatus.RUNNING:
        requests.step()
    for _ in range(12):
        requests.step()
    assert (num_running(first), num_running(second)) == (SHARE, SHARE)
    requests.drain()


def test_later_priorities_do_not_bound_samples() -> None:
    """They would wait for them without the bound as well."""
    requests = Requests()
    low = requests.add(3, max_tokens=50, priority=1)
    requests.step()
    samples = requests.add(9, PLACES, max_tokens=10)
    requests.step()
    assert (num_running(low), num_running(samples)) == (1, PLACES - 1)
    requests.drain()


def test_samples_give_places_to_a_request_that_comes_later() -> None:
    """The last ones are preempted, and go on when there are places again."""
    requests = Requests()
    samples = requests.add(9, PLACES, max_tokens=100)
    for _ in range(3):
        requests.step()
    chat = requests.add(3, max_tokens=10)
    requests.step()
    assert [seq.status for seq in samples[SHARE:]] == [SequenceStatus.WAITING] * (PLACES - SHARE)
    while chat[0].finish_reason is None:
        requests.step()
        assert num_running(samples) == SHARE or chat[0].finish_reason
    assert requests.scheduler.num_preemptions == PLACES - SHARE
    for _ in range(PATIENCE + 1):
        requests.step()
    assert num_running(samples) == PLACES
    requests.drain()
    assert [len(seq.output_token_ids) for seq in samples] == [100] * PLACES


def test_samples_also_give_up_places_that_nobody_needs() -> None:
    """Each of them makes the steps of the other request longer."""
    requests = Requests()
    samples = requests.add(9, PLACES - 3, max_tokens=20)
    requests.step()
    requests.add(3, max_tokens=10)
    requests.step()
    assert num_running(samples) == SHARE
    requests.drain()


def test_a_moment_without_others_gives_no_places() -> None:
    """Clients that send their next requests together leave a request alone for a few steps."""
    requests = Requests()
    requests.add(3, max_tokens=10)
    requests.step()
    samples = requests.add(9, 3 * PLACES, max_tokens=200)
    for _ in range(5):
        for _ in range(20):
            requests.step()
            assert num_running(samples) <= SHARE
        requests.add(3, max_tokens=10)
    requests.drain()


def test_samples_give_places_though_another_request_is_the_last_that_runs() -> None:
    requests = Requests()
    late = requests.add(3, max_tokens=300, priority=1)
    requests.step()
    samples = requests.add(9, 40, max_tokens=100)
    requests.step()
    assert num_running(samples) == PLACES - 1 and requests.scheduler.running[-1] is late[0]
    chat = requests.add(3, max_tokens=10)
    for _ in range(2):
        requests.step()
    assert (num_running(samples), num_running(chat), num_running(late)) == (SHARE, 1, 1)
    requests.drain()


def test_all_requests_with_many_samples_give_places() -> None:
    requests = Requests()
    many = [requests.add(9, 40, max_tokens=100) for _ in range(2)]
    requests.step()
    others = [requests.add(3, max_tokens=50)[0] for _ in range(PLACES - 2 * SHARE)]
    for _ in range(2):
        requests.step()
    assert [num_running(samples) for samples in many] == [SHARE, SHARE]
    assert num_running(others) == len(others)
    requests.drain()


def test_a_request_keeps_its_places_for_a_while_when_another_of_its_kind_ends() -> None:
    """It has as many as next to that one, then all."""
    requests = Requests()
    first = requests.add(9, 40, max_tokens=200)
    second = requests.add(9, PLACES // 2, max_tokens=10)
    for _ in range(PATIENCE):
        requests.step()
        assert num_running(first) == PLACES // 2
    assert num_running(second) == requests.scheduler.num_preemptions == 0
    for _ in range(11):
        requests.step()
    assert num_running(first) == PLACES
    requests.drain()


def test_samples_with_a_chunk_of_a_prompt_count_once() -> None:
    """Preempted ones compute long prompts again, in chunks, as many at a time as may run."""
    requests = Requests(enable_prefix_caching=False, scheduling="mixed")
    requests.add(3, max_tokens=300)
    requests.step()
    samples = requests.add(50, PLACES, max_tokens=60)
    while num_running(samples) < SHARE:
        requests.step()
    for seq in samples[1:SHARE]:
        requests.scheduler.preempt(seq)
    requests.step()
    requests.step()
    prefilling = [seq for seq in samples if seq.is_prefilling and seq.room]
    assert prefilling and num_running(samples) == SHARE
    requests.drain()


def test_a_step_looks_at_few_of_the_samples_that_wait() -> None:
    requests = Requests()
    requests.add(3, max_tokens=300)
    samples = requests.add(9, 1000, max_tokens=100)
    for _ in range(3):
        requests.step()
    queue = requests.scheduler.admission.waiting = Queue(requests.scheduler.waiting)
    for _ in range(10):
        batch = requests.scheduler.schedule()
        assert batch is not None
        requests.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
    assert num_running(samples) == SHARE
    assert queue.num_read < 10 * 100


def test_the_least_share_is_two_places() -> None:
    options: Any = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01, max_num_seqs=4)
    with LLM(EMBEDDED_MODEL, **options) as llm:
        accepted = llm.intake.accept("1+1=", SamplingParams(n=3))
        assert llm.intake.request(accepted, streams=False).seqs[0].parts.samples.most == 2


def test_samples_do_not_depend_on_other_requests() -> None:
    """Neither on those that take their places. Only requests of more samples than that pay."""
    asked = SamplingParams(n=12, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    chat = SamplingParams(max_tokens=9, ignore_eos=True)
    few = SamplingParams(n=2, max_tokens=2)
    options: Any = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01, max_num_seqs=8)
    with LLM(EMBEDDED_MODEL, **options) as llm:

        def tokens(*, others: bool) -> list[list[int]]:
            number = llm.add_request("12+34=", asked)
            outputs = []
            for step in range(200):
                if others and step in (3, 9):
                    llm.add_request("1+1=", chat)
                outputs += [output for output in llm.step() if output["request_id"] == number]
            return [one["token_ids"] for one in outputs[0]["outputs"]]

        assert tokens(others=True) == tokens(others=False)
        assert llm.scheduler.num_preemptions > 0
        for params, is_bounded in ((asked, True), (few, False)):
            request = llm.intake.request(llm.intake.accept("1+1=", params), streams=False)
            limits = {seq.parts.samples for seq in request.seqs}
            assert (None not in limits) == is_bounded and len(limits) == 1
