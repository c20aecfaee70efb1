"""An error of one request ends that request: NaN in its logits, work for its draws that raises."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Adversary, speculate, use_graphs
from reference import SMALL_POOL, audit_at_rest, make_llm, make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.failures import NOT_FINITE
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.constraint import GrammarConstraint

pytestmark = pytest.mark.usefixtures("one_thread")

POISON = 77  # a token with NaN as its embedding
LENGTH = 12
PROMPTS = [[i for i in prompt if i != POISON] for prompt in make_prompts()[:8]]
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=LENGTH, ignore_eos=True)
REGIMES: dict[str, dict[str, Any]] = {
    "plain PyTorch, mixed, overlap, small pool": dict(
        SMALL_POOL, attention_backend="torch", scheduling="mixed", overlap=True
    ),
    "graphs, overlap": dict(overlap=True),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 5}),
    "drafts in rows, overlap, small pool": dict(
        SMALL_POOL, attention_backend="torch", overlap=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens of each prompt, alone."""
    return [llm.generate([p], SamplingParams(**GREEDY), False)[0].token_ids for p in PROMPTS]


def poison(llm: LLM) -> None:
    for name, param in llm.model_runner.shard.model.named_parameters():
        if "embed_tokens" in name:
            param.data[POISON] = torch.nan


@pytest.mark.parametrize("regime", REGIMES)
def test_nan_logits_end_their_request_alone(
    regime: str, model_dir: Path, expected: list[list[int]]
) -> None:
    """With any way to draw; the others' tokens do not change, in the blocks that had NaN, too."""
    ways: list[dict[str, Any]] = [
        {}, dict(temperature=1.0, seed=3), dict(temperature=1.0, top_p=0.9), dict(logprobs=2),
        dict(structured_outputs=dict(regex="[a-z]{20}")), dict(presence_penalty=0.5),
        dict(temperature=1.0, top_k=5, logprobs=0), dict(min_tokens=3, stop_token_ids=[1]),
        dict(logits_processors=[lambda _, logits: logits]), dict(n=2), dict(stop=["zzz"]),
    ]  # fmt: skip
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        known = {(tuple(p), 0): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
        if "drafts" in regime:
            speculate(llm, Adversary(1, 259, known))
        if "graphs" in regime:
            use_graphs(llm)
        poison(llm)
        bad = [[*PROMPTS[place % 8][:9], POISON, place] for place in range(len(ways))]
        params = [SamplingParams(**GREEDY | way) for way in ways]
        good = [SamplingParams(**GREEDY)] * len(PROMPTS)
        outputs = llm.generate([*PROMPTS[:4], *bad, *PROMPTS[4:]], [*good[:4], *params, *good[4:]])
        failed = outputs[4:-4]
        assert [o.token_ids for o in outputs[:4] + outputs[-4:]] == expected
        for output in failed:
            for sample in output.outputs:
                assert (sample.finish_reason, sample.token_ids) == ("error", [])
                assert NOT_FINITE in str(sample.stop_reason)
        assert failed[0].stop_reason == NOT_FINITE
        assert [o.token_ids for o in llm.generate(PROMPTS, good)] == expected
        audit_at_rest(llm)


def test_a_request_whose_logits_become_nan_keeps_the_tokens_before(
    model_dir: Path, expected: list[list[int]]
) -> None:
    """Steps overlap: the next step of the request has begun when its end is known."""
    with make_llm(model_dir, overlap=True) as llm:
        later = SamplingParams(**GREEDY, logit_bias={POISON: 100.0}, logprobs=0, stop=["zzz"])
        poison(llm)
        events = [*llm.stream(PROMPTS[:2], [later, SamplingParams(**GREEDY)])]
        texts = [[e for e in events if e.index == index] for index in range(2)]
        assert [i for e in texts[0] for i in e.token_ids] == [POISON]
        assert texts[0][-1].finish_reason == "error"
        assert [i for e in texts[1] for i in e.token_ids] == expected[1]
        audit_at_rest(llm)


def raising_for(method: Any, first: int, error: BaseException, times: int = 1 << 30) -> Any:
    """The method, which raises for sequences with the first token `first`."""
    left = [times]

    def call(self: Any, seq: Sequence) -> Any:
        if seq.token_ids[0] == first and seq.num_known_tokens > seq.num_prompt_tokens and left[0]:
            left[0] -= 1
            raise error
        return method(self, seq)

    return call


WAYS: list[tuple[type, dict[str, Any]]] = [
    (GrammarConstraint, dict(structured_outputs=dict(regex="[a-z]{5}"))),
    (TokenCounts, dict(repetition_penalty=1.2)),
]


@pytest.mark.parametrize(("kind", "asked"), WAYS, ids=["constraint", "counts"])
@pytest.mark.parametrize("error", [KeyError("lost"), BaseException("panic")])
def test_a_follower_that_raises_ends_its_request_alone(
    kind: type, asked: dict[str, Any], error: BaseException, llm: LLM,
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    params = SamplingParams(**GREEDY | asked)
    wanted = llm.generate([[8, 3]], params, use_tqdm=False)[0].token_ids
    monkeypatch.setattr(kind, "update", raising_for(kind.update, 7, error))  # type: ignore[attr-defined]
    prompts = [[7, 3], [8, 3], PROMPTS[0]]
    outputs = llm.generate(prompts, [params, params, SamplingParams(**GREEDY)], use_tqdm=False)
    assert [o.finish_reason == "error" for o in outputs] == [True, False, False]
    assert f"{kind.__name__} raised {type(error).__name__}: " in str(outputs[0].stop_reason)
    assert outputs[1].token_ids == wanted and outputs[2].token_ids == expected[0]
    audit_at_rest(llm)


@pytest.mark.parametrize("way", ["kernel by kernel", "graphs", "two ranks"])
def test_a_draw_that_cannot_be_prepared_ends_its_request_alone(
    way: str, model_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it draws meanwhile is no token of the request, and stops nothing."""
    after = TokenCounts.after

    def failing(self: TokenCounts, drafts: list[int]) -> Any:
        if 7 in self._places and len(self._places) > 3:
            raise ValueError("not counted")
        return after(self, drafts)

    monkeypatch.setattr(TokenCounts, "after", failing)
    counted = SamplingParams(**GREEDY | dict(presence_penalty=0.1))
    stops = SamplingParams(temperature=0, presence_penalty=0.1, stop_token_ids=range(200))
    size = 2 if way == "two ranks" else 1
    with make_llm(model_dir, overlap=True, tensor_parallel_size=size) as llm:
        if way == "graphs":
            use_graphs(llm)
        prompts = [[7, 3, 4], [8, 3], [7, 8, 9, 10], PROMPTS[0]]
        params = [counted, counted, stops, SamplingParams(**GREEDY)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        reasons = [output.finish_reason for output in outputs]
        assert reasons == ["error", "length", "error", "length"]
        assert [len(output.token_ids) for output in outputs] == [1, LENGTH, 0, LENGTH]
        assert outputs[0].stop_reason == "preparing a draw raised ValueError: not counted"
        assert outputs[3].token_ids == expected[0]
        audit_at_rest(llm)


def test_what_a_signal_raises_is_for_the_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for the request does not raise it again."""
    params = SamplingParams(**GREEDY, repetition_penalty=1.2)
    failing = raising_for(TokenCounts.update, 7, TimeoutError("enough"), times=1)
    monkeypatch.setattr(TokenCounts, "update", failing)
    with pytest.raises(TimeoutError, match="enough"):
        llm.generate([[7, 3]], params, use_tqdm=False)
    assert llm.generate([[7, 3]], params, use_tqdm=False)[0].finish_reason == "length"


def test_blocks_are_reused_after_an_error_only_when_the_device_is_done(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    restart = Scheduler.restart

    def restarted(self: Scheduler, seqs: Any) -> None:
        calls.append("restart")
        restart(self, seqs)

    monkeypatch.setattr(Shard, "synchronize", lambda _: calls.append("synchronize"))
    monkeypatch.setattr(Scheduler, "restart", restarted)
    with pytest.raises(ZeroDivisionError):
        llm.alone(lambda: 1 // 0)
    assert calls == ["synchronize", "restart"]


def test_min_tokens_need_a_token_that_does_not_stop(llm: LLM) -> None:
    """Else nothing can be drawn; the requests before and after do not notice."""
    stops = range(259)
    with pytest.raises(ValueError, match=r"min_tokens needs tokens that do not stop.*259 tokens"):
        llm.generate([1], SamplingParams(min_tokens=1, stop_token_ids=stops), use_tqdm=False)
    all_but_eos = [i for i in stops if i not in llm.eos_token_ids]
    with pytest.raises(ValueError, match="min_tokens needs tokens that do not stop"):
        llm.generate([1], SamplingParams(min_tokens=1, stop_token_ids=all_but_eos), use_tqdm=False)
    params = SamplingParams(min_tokens=1, stop_token_ids=all_but_eos, ignore_eos=True)
    assert llm.generate([1], params, use_tqdm=False)[0].token_ids[0] in llm.eos_token_ids


def test_a_dead_end_wins_over_stop(llm: LLM) -> None:
    """All tokens stop, or are forbidden: none is drawn in their place."""
    params = SamplingParams(
        min_tokens=2, structured_outputs={"regex": "a"}, stop_token_ids=range(1, 259)
    )
    (output,) = llm.generate([1], params, use_tqdm=False)
    assert output.finish_reason == "error" and "leave no token to draw" in str(output.stop_reason)
