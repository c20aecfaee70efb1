"""A step reports few tokens of prompts while other requests wait for it."""

import itertools
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests import extras
from nanovllm.engine.requests.logprobs import Logprobs
from nanovllm.engine.requests.report_limit import ReportLimit
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence

MOST, BUDGET = 8, 64


class Requests:
    """A scheduler without a model, whose sequences share a limit of `MOST` reported tokens."""

    def __init__(self, **options: Any) -> None:
        sizes = dict(kvcache_block_size=4, max_num_batched_tokens=BUDGET, max_num_seqs=9)
        config = Config("m", overlap=False, **sizes, **options)
        self.scheduler = Scheduler(EngineConfig.settle(config, 100, 400))
        self._limit, self._fresh = ReportLimit(MOST), itertools.count()

    def add(self, num_tokens: int, reports: bool = False, **params: Any) -> Sequence:
        """Queue a request."""
        logprobs = Logprobs(num_tokens, self._limit) if reports else None
        prompt = [next(self._fresh) for _ in range(num_tokens)]  # no shared blocks
        parts = SequenceParts(logprobs=logprobs)
        seq = Sequence(prompt, SamplingParams(**params), parts=parts, max_model_len=400)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[Sequence, int]]:
        """Run a step; returns how many tokens of which sequences it computed."""
        batch = self.scheduler.schedule()
        assert batch is not None
        work = [(seq, seq.num_scheduled_tokens) for seq in batch.seqs]
        for seq, number in work:
            if (logprobs := seq.parts.logprobs) is not None and logprobs.wanted:
                start = seq.num_cached_tokens
                assert start == logprobs.wanted.start, "a gap, or twice the same"
                logprobs.wanted = range(start + number, logprobs.wanted.stop)
        self.scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
        return work


@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed"])
def test_the_prompts_of_a_step_share_the_limit(scheduling: str) -> None:
    """Long and short ones together, however many begin at the same time."""
    requests = Requests(scheduling=scheduling)
    chat = requests.add(3, max_tokens=100)
    requests.step()
    scored = [requests.add(length, True, max_tokens=1) for length in (30, 5, 30, 5)]
    numbers = []
    while any(not seq.finish_reason for seq in scored):
        numbers.append(sum(number for seq, number in requests.step() if seq is not chat))
    assert max(numbers) <= MOST and sum(numbers) == 70
    assert len([number for number in numbers if number]) <= 70 // MOST + 2, "steps are filled"


def test_other_prompts_do_not_wait_for_reports() -> None:
    """They get the rest of a step's budget, also if they came later."""
    requests = Requests()
    scored = [requests.add(40, True, max_tokens=1) for _ in range(2)]
    later = requests.add(10, max_tokens=2)
    assert requests.step() == [(scored[0], MOST), (later, 10)]
    assert requests.step() == [(scored[0], MOST)]
    assert requests.step() == [(later, 1)]
    assert requests.step() == [(scored[0], 24), (scored[1], 40)], "nobody else waits"


def test_a_long_prompt_without_reports_is_not_stopped_by_reports() -> None:
    """It is no longer in the queue after its first step, and does not decode yet."""
    requests = Requests()
    scored = requests.add(200, True, max_tokens=1)
    other = requests.add(150, max_tokens=2)
    for _ in range(2):
        assert requests.step() == [(scored, MOST), (other, BUDGET - MOST)]
    assert requests.step() == [(scored, MOST), (other, 150 - 2 * (BUDGET - MOST))]


def test_without_others_a_step_is_full() -> None:
    """So scoring alone is as fast as without a limit."""
    requests = Requests()
    first, second = (requests.add(50, True, max_tokens=1) for _ in range(2))
    assert requests.step() == [(first, 50), (second, BUDGET - 50)]


def test_log_probabilities_are_the_same_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a request that generates, each step of the model reports few tokens."""
    monkeypatch.setattr(extras, "ReportLimit", lambda: ReportLimit(5))
    scores = SamplingParams(max_tokens=1, prompt_logprobs=3)
    prompts = ["12+34=46", "1+1=", "99*9="]
    with LLM(EMBEDDED_MODEL, device="cpu", cpu_kvcache_gib=0.01) as llm:
        alone = llm.generate(prompts, scores, use_tqdm=False)
        begin, numbers = llm.model_runner.begin, []

        def counting(batch: Batch) -> Any:
            begun = begin(batch)
            numbers.append(len(begun.prompts))
            return begun

        monkeypatch.setattr(llm.model_runner, "begin", counting)
        chat = SamplingParams(max_tokens=30, ignore_eos=True)
        _, *small = llm.generate(["5+5=", *prompts], [chat, *[scores] * 3], use_tqdm=False)
    assert max(numbers) <= 5 < sum(numbers)
    for one, other in zip(alone, small, strict=True):
        assert one["prompt_logprobs"] is not None and other["prompt_logprobs"] is not None
        for likely, same in zip(
            one["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True
        ):
            assert likely is not None and same is not None
            assert [t["token_id"] for t in likely] == [t["token_id"] for t in same]
            values = [token["logprob"] for token in same]
            assert [token["logprob"] for token in likely] == pytest.approx(values, abs=1e-5)
