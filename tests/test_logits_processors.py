"""Callables on logits: what they see, when they apply, and what becomes of their mistakes."""

import asyncio
import dataclasses
import itertools
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audits import audit_scheduler
from drafts import Adversary, speculate, use_graphs
from processors_to_import import Ban, ban_even, needs_prompt
from reference import (
    HARD,
    SMALL_POOL,
    audit_at_rest,
    load_reference,
    make_llm,
    make_prompts,
)
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from nanovllm import LLM, SamplingParams
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.openai.request import COMPLETIONS, parse_body

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = make_prompts()[:24]
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=12, ignore_eos=True)
Row = torch.Tensor


def by_position(prompt: list[int], output: list[int], logits: Row) -> Row:
    """A choice that depends on all that is passed: no token that has occurred, in turns."""
    logits[list({*prompt[-5:], *output})] = -torch.inf
    return torch.where(torch.arange(len(logits)) % 3 == len(output) % 3, logits, logits - 50)


REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "small pool, budget 16": HARD,
    "overlap": dict(overlap=True),
    "mixed, overlap, small pool": dict(HARD, scheduling="mixed", overlap=True),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 5}),
    "drafts in rows, overlap, small pool": dict(
        SMALL_POOL, attention_backend="torch", overlap=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5},
    ),
    "graphs, overlap": dict(overlap=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """What transformers' logits give, token by token, with the callable on each row."""
    model = load_reference(model_dir)
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            output: list[int] = []
            for _ in range(12):
                logits = model(torch.tensor([prompt + output])).logits[0, -1]
                output.append(int(by_position(prompt, list(output), logits).argmax()))
            outputs.append(output)
    return outputs


@pytest.mark.parametrize("regime", REGIMES)
def test_greedy_output_is_that_of_the_changed_logits(
    regime: str, model_dir: Path, expected: list[list[int]]
) -> None:
    """Beside requests without callables, whose tokens do not change."""
    changed = SamplingParams(**GREEDY, logits_processors=[by_position])
    params = [changed if i % 3 else SamplingParams(**GREEDY) for i in range(len(PROMPTS))]
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        plain = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    wants = [expected[i] if i % 3 else plain[i].token_ids for i in range(len(PROMPTS))]
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        if "drafts" in regime:
            known = {(tuple(p), 0): tokens for p, tokens in zip(PROMPTS, wants, strict=True)}
            speculate(llm, Adversary(1, 259, known))
        if "graphs" in regime:
            use_graphs(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == wants
        audit_at_rest(llm)


def test_two_ranks_draw_from_the_changed_logits(model_dir: Path, expected: list[list[int]]) -> None:
    params = SamplingParams(**GREEDY, logits_processors=[by_position])
    with make_llm(model_dir, tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


def test_callables_see_tokens_and_float32_logits(llm: LLM) -> None:
    """One call for each token, in the order of the list."""
    seen: list[Any] = []

    def two(output: list[int], logits: Row) -> Row:
        seen.append((list(output), None, logits.dtype, tuple(logits.shape)))
        return logits + 1

    def three(prompt: list[int], output: list[int], logits: Row) -> Row:
        seen.append((list(output), list(prompt), logits.dtype, tuple(logits.shape)))
        return logits

    params = SamplingParams(**GREEDY, logits_processors=[two, three])
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    (plain,) = llm.generate([5, 6, 7], SamplingParams(**GREEDY), use_tqdm=False)
    assert output.token_ids == plain.token_ids
    prefixes = [output.token_ids[:i] for i in range(12)]
    both = [(p, prompt) for p in prefixes for prompt in (None, [5, 6, 7])]
    assert seen == [(p, prompt, torch.float32, (259,)) for p, prompt in both]


def test_callables_come_first(llm: LLM) -> None:
    """What they set is then penalized, biased, and left out by lists."""

    def only(output: list[int], logits: Row) -> Row:
        changed = torch.full_like(logits, -20.0)
        changed[[7, 8, 9]] = torch.tensor([10.0, 9.0, 8.0])
        return changed

    def first(**more: Any) -> list[int]:
        params = SamplingParams(**GREEDY | more, logits_processors=[only])
        return list(llm.generate([1], params, use_tqdm=False)[0].token_ids)

    assert first(max_tokens=3) == [7, 7, 7]
    assert first(max_tokens=3, logit_bias={8: 2.0}) == [8, 8, 8]
    assert first(max_tokens=3, allowed_token_ids=[9, 20]) == [9, 9, 9]
    assert first(max_tokens=5, presence_penalty=1.5) == [7, 8, 7, 7, 7]
    assert first(max_tokens=3, min_tokens=2, stop_token_ids=[7]) == [8, 8, 7]
    grammar = {"regex": re.escape(llm.tokenizer.decode([9])) + "+"}
    assert first(max_tokens=3, structured_outputs=grammar) == [9, 9, 9]
    assert {*first(max_tokens=12, temperature=100.0, top_k=2)} == {7, 8}


def test_samples_are_those_of_the_changed_logits(llm: LLM) -> None:
    """A bias by hand draws what `logit_bias` draws: the same keys, the same logits."""

    def bias(output: list[int], logits: Row) -> Row:
        logits[50:60] += 4.0
        return logits

    asked: dict[str, Any] = dict(temperature=1.1, max_tokens=20, seed=3, n=3, ignore_eos=True)
    biases = dict.fromkeys(range(50, 60), 4.0)
    for more in ({}, {"top_p": 0.8}, {"top_k": 9, "min_p": 0.01}):
        mine = SamplingParams(**asked, **more, logits_processors=[bias])
        theirs = SamplingParams(**asked, **more, logit_bias=biases)
        outputs = [llm.generate(PROMPTS[:5], p, use_tqdm=False) for p in (mine, theirs)]
        for one, other in zip(*outputs, strict=True):
            assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]


def test_transformers_processors_take_one_line(llm: LLM, model_dir: Path) -> None:
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])

    def adapted(prompt: list[int], output: list[int], logits: Row) -> Row:
        return theirs(torch.tensor([prompt + output]), logits[None])[0]

    params = SamplingParams(**GREEDY, logits_processors=[adapted])
    outputs = llm.generate(PROMPTS[:8], params, use_tqdm=False)
    model = load_reference(model_dir)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        ids = torch.tensor([prompt])
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            repetition_penalty=1.7, eos_token_id=None, pad_token_id=256,
        )  # fmt: skip
        assert output.token_ids == want[0, len(prompt) :].tolist()


def raises(output: list[int], logits: Row) -> Row:
    if len(output) == 3:
        raise KeyError("lost")
    return logits


class NoTextError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raises_without_text(output: list[int], logits: Row) -> Row:
    if len(output) == 3:
        raise NoTextError
    return logits


def at_third(value: Any) -> Any:
    def call(output: list[int], logits: Row) -> Any:
        return (value(logits) if callable(value) else value) if len(output) == 3 else logits

    return call


BAD_RESULTS: list[tuple[Any, str]] = [
    (raises, r"logits_processors\[1\]: KeyError: 'lost'"),
    (raises_without_text, r"logits_processors\[1\]: NoTextError$"),
    (at_third(None), "must return a tensor, got NoneType"),
    (at_third(np.zeros(259)), "must return a tensor, got ndarray"),
    (at_third(lambda x: x[:-1]), r"logits of shape \[259\], got \[258\]"),
    (at_third(lambda x: x[None]), r"logits of shape \[259\], got \[1, 259\]"),
    (at_third(lambda x: x.double()), "logits of dtype torch.float32, got torch.float64"),
    (at_third(lambda x: x * torch.nan), "leave no token to draw"),
    (at_third(lambda x: torch.full_like(x, -torch.inf)), "leave no token to draw"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("call", "message"), BAD_RESULTS, ids=[m for _, m in BAD_RESULTS])
def test_a_bad_result_ends_its_request_alone(
    call: Any, message: str, overlap: bool, model_dir: Path
) -> None:
    """With an "error", after the tokens before it; whatever stops or is allowed."""
    good = lambda output, logits: logits  # noqa: E731
    bad = SamplingParams(
        **GREEDY | {"ignore_eos": False}, logits_processors=[good, call],
        stop_token_ids=range(258) if message.startswith("leave") else [0, 1],
        min_tokens=4,
    )  # fmt: skip
    with make_llm(model_dir, overlap=overlap) as llm:
        params = [SamplingParams(**GREEDY), bad, SamplingParams(**GREEDY)]
        outputs = llm.generate([[5, 6], [7, 8], [9]], params, use_tqdm=False)
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
        assert len(outputs[1].token_ids) == 3
        assert re.search(message, str(outputs[1].stop_reason))
        audit_at_rest(llm)
        assert llm.generate("a", SamplingParams(**GREEDY), use_tqdm=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", [raises, at_third(lambda x: x * torch.nan)])
def test_an_error_wins_over_a_token_that_stops(call: Any, overlap: bool, model_dir: Path) -> None:
    """The token in place of the failed logits is masked away, and what is drawn stops."""
    params = SamplingParams(
        temperature=0, min_tokens=4, stop_token_ids=[0], allowed_token_ids=[7],
        logits_processors=[call],
    )  # fmt: skip
    with make_llm(model_dir, overlap=overlap) as llm:
        (output,) = llm.generate("a", params, use_tqdm=False)
        assert (output.finish_reason, output.token_ids) == ("error", [7] * 3)
        audit_at_rest(llm)


def test_processors_of_transformers_are_named_where_they_fail(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, logits_processors=[RepetitionPenaltyLogitsProcessor(1.5)])
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.finish_reason == "error"
    assert "one of transformers takes (input_ids, scores)" in str(output.stop_reason)


def test_an_interrupt_inside_leaves_the_engine_usable(llm: LLM) -> None:
    def interrupt(output: list[int], logits: Row) -> Row:
        if len(output) == 2:
            raise KeyboardInterrupt
        return logits

    params = SamplingParams(**GREEDY, logits_processors=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:4], params, use_tqdm=False)
    audit_at_rest(llm)
    assert llm.is_finished() and llm.generate("a", SamplingParams(**GREEDY), use_tqdm=False)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([5], r"logits_processors\[0\] must be callable, got 5"),
        ([ban_even, lambda x: x], r"logits_processors\[1\] must take \(token_ids, logits\) or"),
        ([lambda *x: x[-1]], r"logits_processors\[0\] must take"),
        ([lambda a, *, b: b], r"logits_processors\[0\] must take"),
    ],
)
def test_what_is_no_processor_is_refused(calls: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(logits_processors=calls)


class Unhashable:
    """A callable that can be compared, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, output: list[int], logits: Row) -> Row:
        return logits


def test_a_callable_needs_no_hash(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, logits_processors=[Unhashable()])
    assert len(llm.generate("a", params, use_tqdm=False)[0].token_ids) == 12


def test_parameters_with_callables_can_be_hashed_and_changed() -> None:
    params = SamplingParams(logits_processors=[ban_even])
    assert {params: 1}[dataclasses.replace(params)] == 1
    assert SamplingParams(logits_processors=[]).logits_processors == ()


def test_async_requests_take_importable_callables(llm: LLM, model_dir: Path) -> None:
    importable = [ban_even, needs_prompt, Ban([5, 7])]

    async def run() -> Any:
        async with AsyncLLM(model_dir, device="cpu", dtype="float32", cpu_kvcache_gib=0.05) as one:
            params = SamplingParams(**GREEDY, logits_processors=importable)
            found = await one.complete([9, 8], params)
            locked = Ban([1])
            locked.lock = threading.Lock()  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="logits_processors must pickle, as an AsyncLLM's"):
                await one.complete([1], SamplingParams(logits_processors=[locked]))
            lost = Ban([1])
            lost.__class__ = type("Lost", (Ban,), {"__reduce__": lambda _: (int, ("lost",))})
            with pytest.raises(ValueError, match="must be importable in the engine's process"):
                await one.complete([1], SamplingParams(logits_processors=[lost]))
            assert one.num_open == 0
            failing = SamplingParams(**GREEDY, logits_processors=[Ban(["x"])])
            return found, await one.complete([9, 8], failing)

    found, failed = asyncio.run(run())
    params = SamplingParams(**GREEDY, logits_processors=importable)
    (want,) = llm.generate([9, 8], params, use_tqdm=False)
    assert found.token_ids == want.token_ids and not any(i % 2 == 0 for i in want.token_ids)
    assert failed.finish_reason == "error" and "logits_processors[0]" in failed.stop_reason


def test_bodies_refuse_them() -> None:
    with pytest.raises(ValueError, match="logits_processors is for calls in Python"):
        parse_body(COMPLETIONS, {"prompt": "a", "logits_processors": ["x"]}, {})


@pytest.mark.parametrize("seed", range(3))
def test_random_walks_with_callables_and_hidden_states(
    seed: int, model_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts, restarts, and preemptions as if blocks had run out; beside plain requests."""
    rng = random.Random(seed)
    options: dict[str, Any] = dict(
        max_num_batched_tokens=rng.choice([11, 40]), kvcache_block_size=4, num_kvcache_blocks=60,
        overlap=seed % 2 == 1, scheduling=rng.choice(["mixed", "prefill-first"]),
    )  # fmt: skip
    states: dict[int, torch.Tensor] = {}
    with make_llm(model_dir, **options) as llm:
        scheduler, schedule_prefill = llm.scheduler, llm.scheduler._schedule_prefill

        def preempting(budget: int, decodes: list[Sequence]) -> tuple[list[Sequence], int]:
            if len(scheduler.running) > 1 and rng.random() < 0.15:
                if decodes and decodes[-1] is scheduler.running[-1]:
                    decodes.pop()
                scheduler.preempt(scheduler.running[-1])
            return schedule_prefill(budget, decodes)

        monkeypatch.setattr(scheduler, "_schedule_prefill", preempting)
        wanted: dict[int, tuple[int, int]] = {}
        done = 0
        for _ in range(300):
            if rng.random() < 0.5 and len(llm.requests.unfinished) < 16:
                index = rng.randrange(len(PROMPTS))
                number = rng.choice([2, 5, 12])
                asked = SamplingParams(
                    **GREEDY | {"max_tokens": number}, logits_processors=[by_position],
                    priority=rng.randrange(3), hidden_states=rng.random() < 0.5,
                )  # fmt: skip
                if rng.random() < 0.7:
                    wanted[llm.add_request(PROMPTS[index], asked)] = index, number
                else:
                    llm.add_request(PROMPTS[index], SamplingParams(**GREEDY))
            if llm.requests.unfinished and rng.random() < 0.05:
                llm.abort_request(rng.choice([*llm.requests.unfinished]))
            if rng.random() < 0.03:
                llm.recover(llm.requests.all)
            for output in llm.step():
                if output.request_id not in wanted:
                    continue
                index, number = wanted[output.request_id]
                assert output.token_ids == expected[index][:number]
                done += 1
                if output.hidden_states is None:
                    continue
                parts = (output.prompt_hidden_states, output.hidden_states[1:])
                found = torch.cat(parts)  # type: ignore[arg-type]
                assert len(found) == output.num_prompt_tokens + number - 1
                known = states.setdefault(index, found)
                shared = min(len(known), len(found))
                assert (found[:shared] - known[:shared]).abs().max() < 1e-5
            audit_scheduler(llm.scheduler)
        assert done > 5 and len(states) > 2
        assert llm.stats().num_preemptions > 10


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True)])
def test_callables_on_a_device(options: dict[str, Any], model_dir: Path) -> None:
    """Logits are the device's. Rows without callables have the tokens that graphs draw."""

    def odd(output: list[int], logits: Row) -> Row:
        assert logits.is_cuda
        logits[::2] = -torch.inf
        return logits

    params = [
        SamplingParams(**GREEDY, logits_processors=[odd] if i % 2 else None)
        for i in range(len(PROMPTS))
    ]
    with make_llm(model_dir, device="cuda", num_kvcache_blocks=2000, **options) as llm:
        plain = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for index, output in enumerate(outputs):
            if index % 2:
                assert all(token_id % 2 for token_id in output.token_ids)
            else:
                assert output.token_ids == plain[index].token_ids
        bad = SamplingParams(**GREEDY, logits_processors=[lambda _, x: x * torch.nan])
        assert llm.generate([1], bad, use_tqdm=False)[0].finish_reason == "error"


def test_the_reference_depends_on_all_that_is_passed(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) > len(PROMPTS) // 2
    assert all(len({*tokens}) == len(tokens) for tokens in expected)
    assert all(t % 3 == i % 3 for tokens in expected for i, t in zip(itertools.count(), tokens))
