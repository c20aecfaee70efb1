"""Hidden states of prompts and generated tokens equal those of transformers, in all regimes."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Adversary, speculate, use_graphs
from reference import audit_at_rest, make_llm
from transformers import AutoModel

from nanovllm import LLM, SamplingParams
from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.request import COMPLETIONS, parse_body
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_ERROR = 1e-5
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, hidden_states=True)
SMALL: dict[str, Any] = dict(max_num_batched_tokens=32, kvcache_block_size=4, num_kvcache_blocks=44)
DRAFTS: dict[str, Any] = dict(
    speculative_config={"method": "ngram", "num_speculative_tokens": 5}, kvcache_block_size=4
)
ROWS = dict(DRAFTS, attention_backend="torch")  # the device makes the drafts, as on a GPU
REGIMES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": dict(max_num_batched_tokens=16, kvcache_block_size=4),
    "mixed": dict(max_num_batched_tokens=13, scheduling="mixed", kvcache_block_size=4),
    "little memory": SMALL,
    "overlap": dict(overlap=True),
    "overlap, little memory": dict(SMALL, overlap=True),
    "overlap, mixed": dict(SMALL, max_num_batched_tokens=13, overlap=True, scheduling="mixed"),
    "drafts": DRAFTS,
    "drafts, overlap": dict(DRAFTS, overlap=True),
    "drafts, overlap, little memory": dict(DRAFTS | SMALL, overlap=True),
    "drafts in rows": ROWS,
    "drafts in rows, overlap, little memory": dict(ROWS | SMALL, overlap=True),
    "graphs": dict(overlap=True),
    "no prefix cache": dict(enable_prefix_caching=False, max_num_batched_tokens=16),
    "plain PyTorch": dict(attention_backend="torch", kvcache_block_size=4),
}


def make_prompts() -> list[list[int]]:
    """Odd lengths, repetitions that n-grams guess, a common prefix, some twice."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 3, 16, 17, 33, 101)]
    prompts += [[1, 2, 3] * 12, [9] * 30]
    prompts += [prompts[6][:n] + [7] * (n % 5) for n in (40, 64, 99)]
    return [*prompts, list(prompts[5]), list(prompts[6])]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModel.from_pretrained(model_dir).float().eval()


@torch.inference_mode()
def check(model: Any, output: RequestOutput) -> None:
    """Compare all states of an output with those of its tokens, computed at once."""
    prompt, size = output.prompt_token_ids, output.num_prompt_tokens
    assert output.hidden_states is output.outputs[0].hidden_states
    for sample in output.outputs:
        ids = torch.tensor([prompt + sample.token_ids])
        states = model(ids).last_hidden_state[0]
        number = len(sample.token_ids)
        parts = (
            (output.prompt_hidden_states, states[:size]),
            (sample.hidden_states, states[size - 1 : size + number - 1]),
        )
        for found, want in parts:
            assert found is not None and found.dtype == torch.float32
            assert found.shape == want.shape
            assert (found - want).abs().max() < MAX_ERROR


@pytest.mark.parametrize("regime", REGIMES)
def test_states_are_those_of_transformers(regime: str, model_dir: Path, model: Any) -> None:
    """Beside requests that want none, whose tokens do not change."""
    prompts = make_prompts()
    params = [dataclasses.replace(PARAMS, hidden_states=i % 4 != 3) for i in range(len(prompts))]
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        plain = llm.generate(prompts, SamplingParams(**_plain()), use_tqdm=False)
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        if "drafts" in regime:
            known = {(tuple(p), 0): o.token_ids for p, o in zip(prompts, plain, strict=True)}
            speculate(llm, Adversary(1, 259, known))
        if "graphs" in regime:
            use_graphs(llm)
        for round_ in range(2):  # again, with what is cached
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for asked, output in zip(params, outputs, strict=True):
                if asked.hidden_states:
                    check(model, output)
                else:
                    assert output.hidden_states is output.prompt_hidden_states is None
                    assert "hidden_states" not in output
            if round_ == 0:
                assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        if "little" in regime:
            assert llm.stats().num_preemptions > 0
        if "drafts" in regime:
            assert llm.stats().accepted_tokens > 0
        audit_at_rest(llm)


def _plain() -> dict[str, Any]:
    return dict(temperature=0.8, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, dict(SMALL, overlap=True), dict(max_num_seqs=2)])
def test_each_sample_has_its_own_states(
    options: dict[str, Any], model_dir: Path, model: Any
) -> None:
    params = dataclasses.replace(PARAMS, n=3, temperature=1.2, logprobs=1, prompt_logprobs=0)
    with make_llm(model_dir, **options) as llm:
        for output in llm.generate(make_prompts(), params, use_tqdm=False):
            check(model, output)
            assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1


def test_two_ranks_give_the_states_of_one(model_dir: Path, model: Any) -> None:
    options = dict(max_num_batched_tokens=48, kvcache_block_size=4, tensor_parallel_size=2)
    with make_llm(model_dir, **options) as llm:
        for output in llm.generate(make_prompts(), PARAMS, use_tqdm=False):
            check(model, output)


def test_aborted_requests_have_what_was_computed(model_dir: Path, model: Any) -> None:
    with make_llm(model_dir, max_num_batched_tokens=16, kvcache_block_size=4) as llm:
        for num_steps in (0, 1, 3, 9):
            request_id = llm.add_request(make_prompts()[6], PARAMS)
            for _ in range(num_steps):
                llm.step()
            output = llm.abort_request(request_id)
            states = model(torch.tensor([output.prompt_token_ids + output.token_ids]))
            states = states.last_hidden_state[0]
            kept = output.prompt_hidden_states
            assert kept is not None and output.hidden_states is not None
            assert len(kept) == (101 if output.token_ids else min(16 * num_steps, 100))
            assert len(output.hidden_states) == len(output.token_ids)
            if num_steps:
                assert (kept - states[: len(kept)]).abs().max() < MAX_ERROR


def test_an_interrupt_changes_no_states(
    model_dir: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that survive it start over with the states that they have."""
    with make_llm(model_dir, **SMALL, overlap=True) as llm:
        ids = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()]
        outputs = {}
        for step in range(400):
            if llm.is_finished():
                break
            if step % 7 == 3:
                llm.recover(llm.requests.all)
            outputs |= {output.request_id: output for output in llm.step()}
        for request_id in ids:
            check(model, outputs[request_id])


def test_the_embedded_head_reads_them(model_dir: Path) -> None:
    """The head makes the log-probabilities of the tokens from their states."""
    params = dataclasses.replace(PARAMS, logprobs=0)
    with make_llm(model_dir) as llm:
        (output,) = llm.generate("Hello", params, use_tqdm=False)
        head = llm.model_runner.shard.model.compute_logits
        assert output.hidden_states is not None and output.logprobs is not None
        logprobs = head(output.hidden_states).float().log_softmax(-1)
        for row, token_id, entry in zip(logprobs, output.token_ids, output.logprobs, strict=True):
            assert row[token_id].item() == pytest.approx(entry[token_id].logprob, abs=1e-5)


def test_async_outputs_have_them(model_dir: Path, model: Any) -> None:
    async def complete() -> RequestOutput:
        async with AsyncLLM(model_dir, device="cpu", dtype="float32", cpu_kvcache_gib=0.05) as llm:
            with pytest.raises(ValueError, match="hidden_states must be False in a stream"):
                async for _ in llm.generate("a", PARAMS):
                    pass
            return await llm.complete("Hello", dataclasses.replace(PARAMS, n=2, stop="zz"))

    check(model, asyncio.run(complete()))


def test_streams_and_bodies_refuse_them(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        with pytest.raises(ValueError, match="hidden_states must be False in a stream"):
            llm.stream("a", PARAMS)
        assert llm.is_finished()
    with pytest.raises(ValueError, match="hidden_states is for calls in Python"):
        parse_body(COMPLETIONS, {"prompt": "a", "hidden_states": True}, {})
    assert not parse_body(COMPLETIONS, {"prompt": "a", "hidden_states": False}, {}).params.n - 1


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, SMALL, dict(tensor_parallel_size=1, enforce_eager=True)])
def test_states_on_a_device(options: dict[str, Any], model_dir: Path, model: Any) -> None:
    """Steps with such requests use no decode graphs; the others still do, with equal tokens."""
    options = dict(device="cuda", num_kvcache_blocks=2000) | options
    prompts, params = make_prompts(), dataclasses.replace(PARAMS, seed=5)
    with make_llm(model_dir, **options) as llm:
        plain = llm.generate(prompts, SamplingParams(**_plain(), seed=5), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            states = model(torch.tensor([output.prompt_token_ids + output.token_ids]))
            states = states.last_hidden_state[0]
            assert output.prompt_hidden_states is not None and output.hidden_states is not None
            found = torch.cat([output.prompt_hidden_states, output.hidden_states[1:]])
            assert (found - states[:-1]).abs().max() < 1e-3
        assert json.dumps([o.token_ids for o in outputs]) == json.dumps(
            [o.token_ids for o in plain]
        )


def test_nothing_is_kept_for_other_requests(llm_without: LLM) -> None:
    assert llm_without.model_runner.hidden_reader is None
    llm_without.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm_without.model_runner.hidden_reader is None


@pytest.fixture(scope="module")
def llm_without(model_dir: Path) -> Any:
    with make_llm(model_dir) as llm:
        yield llm
