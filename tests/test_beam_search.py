"""Beam search finds transformers' sequences, token for token, with their scores."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from reference import audit_at_rest, load_reference, make_llm

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.beams.async_beams import AsyncBeams
from nanovllm.beams.outputs import BeamSearchOutput
from nanovllm.beams.search import Search
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.requests.intake import Accepted

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two beams": dict(beam_width=2),
    "one beam": dict(beam_width=1),
    "nine beams": dict(beam_width=9, max_tokens=7),
    "long ones": dict(length_penalty=2.0),
    "short ones": dict(length_penalty=0.0),
    "very short ones": dict(length_penalty=-1.0),
    "early": dict(early_stopping=True),
    "early, long ones": dict(early_stopping=True, length_penalty=1.5),
    "never": dict(early_stopping="never"),
    "never, short ones": dict(early_stopping="never", length_penalty=-0.5),
    "canonical": dict(early_stopping="never", length_penalty=0.0),
    "endless": dict(ignore_eos=True),
    "one token": dict(max_tokens=1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "small blocks, little memory": dict(
        kvcache_block_size=4, num_kvcache_blocks=40, max_num_batched_tokens=32
    ),
    "overlap, mixed": dict(overlap=True, scheduling="mixed", max_num_batched_tokens=40),
    "no prefix cache": dict(enable_prefix_caching=False),
    "plain PyTorch": dict(attention_backend="torch"),
    "two ranks": dict(tensor_parallel_size=2),
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 5, 16, 17, 33, 70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often ends: three of its tokens do."""
    path = make_model(tmp_path_factory.mktemp("beams"), vocab_size=261, seed=4)
    edit_config(path, eos_token_id=[11, 99, 257])
    (path / "generation_config.json").write_text('{"eos_token_id": [11, 99, 257]}')
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    model = load_reference(path)
    with torch.no_grad():  # so that the ends are among the likely tokens
        model.lm_head.weight[[11, 99, 257]] *= 2.5
    model.save_pretrained(path)
    return load_reference(path)


@pytest.fixture(scope="module")
def llm(path: Path, model: Any) -> Iterator[LLM]:
    with make_llm(path) as llm:
        yield llm


def params_of(variant: str) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 4, "max_tokens": 14, **VARIANTS[variant]})


@torch.inference_mode()
def reference(
    model: Any, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """transformers' sequences, without what fills them up, and their scores."""
    eos = None if params.ignore_eos else [11, 99, 257]
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, num_beams=params.beam_width, num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, eos_token_id=eos, pad_token_id=256,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    sequences = []
    for ids in found.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token_id in enumerate(ids) if token_id in (eos or [])]
        sequences.append(ids[: ends[0] + 1] if ends else ids)
    scores = [0.0] if params.beam_width == 1 else found.sequences_scores.tolist()
    return list(zip(sequences, scores, strict=True))


def check(output: BeamSearchOutput, model: Any, params: BeamSearchParams) -> None:
    prompt = output.prompt_token_ids
    want = reference(model, prompt, params)
    assert [sequence.token_ids for sequence in output.sequences] == [ids for ids, _ in want]
    for sequence, (ids, score) in zip(output.sequences, want, strict=True):
        if params.beam_width > 1:
            assert sequence.score == pytest.approx(score, abs=1e-5, rel=1e-6)
        length = len(ids) ** params.length_penalty
        assert sequence.cum_logprob / length == pytest.approx(sequence.score, abs=1e-5)
        ends = ids[-1] in (11, 99, 257) and not params.ignore_eos
        assert sequence.finish_reason == ("stop" if ends else "length")
        assert sequence.stop_reason == (ids[-1] if ends else None)
        assert sequence.tokens == prompt + (ids[:-1] if ends else ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_are_those_of_transformers(variant: str, llm: LLM, model: Any) -> None:
    params = params_of(variant)
    outputs = llm.beam_search(make_prompts(), params)
    for output in outputs:
        check(output, model, params)
    reasons = {s.finish_reason for output in outputs for s in output.sequences}
    assert "stop" in reasons or variant in ("endless", "one token", "one beam")
    audit_at_rest(llm)


@pytest.mark.parametrize("options", OPTIONS)
def test_they_are_the_same_in_all_regimes(options: str, path: Path, model: Any) -> None:
    """With limits on how many are searched at once, and beside requests that generate."""
    params = params_of("plain")
    with make_llm(path, **OPTIONS[options]) as llm:
        request_id = llm.add_request([5, 6], SamplingParams(temperature=0, max_tokens=30))
        for limit in (None, 1, 3):
            for output in llm.beam_search(make_prompts(), params, concurrency_limit=limit):
                check(output, model, params)
        assert request_id in {*llm.requests.unfinished, *llm.requests.finished}
        while not llm.is_finished():
            llm.step()
        audit_at_rest(llm)


def test_what_is_cached_is_not_computed_again(path: Path, model: Any) -> None:
    """Of each sequence less than a block."""
    with make_llm(path, kvcache_block_size=4) as llm:
        llm.beam_search([[7] * 201], params_of("endless"))
        assert llm.stats().prefill_tokens <= 201 + 13 * 4 * 4


def test_texts_begin_with_the_prompt(llm: LLM) -> None:
    (output,) = llm.beam_search({"prompt": "Hi"}, params_of("plain"))
    assert output.prompt == "Hi"
    for sequence in output.sequences:
        assert sequence["text"] == llm.tokenizer.decode(sequence.tokens)
        assert sequence.text.startswith("Hi")
    params = BeamSearchParams(beam_width=4, max_tokens=14, include_stop_str_in_output=True)
    (whole,) = llm.beam_search("Hi", params)
    for sequence in whole.sequences:
        assert sequence.tokens == output.prompt_token_ids + sequence.token_ids
    assert llm.beam_search([], params) == []


def test_outputs_end_with_the_models_length(path: Path, model: Any) -> None:
    with make_llm(path, max_model_len=20) as llm:
        (output,) = llm.beam_search([[5] * 15], BeamSearchParams(beam_width=3, ignore_eos=True))
        assert {len(sequence.tokens) for sequence in output.sequences} == {20}


@pytest.mark.parametrize("penalty", [-30, 30])
def test_every_length_penalty_gives_finite_scores(penalty: float) -> None:
    """Also with the longest outputs that any model has."""
    length = 2**31
    search = Search(BeamSearchParams(length_penalty=penalty), length, frozenset([0]))
    score = search.score(-20.0 * length, length)
    assert math.isfinite(score) and score < 0


def test_more_candidates_than_tokens() -> None:
    """The first step has fewer candidates than sequences are kept."""
    search = Search(BeamSearchParams(beam_width=5, max_tokens=3), 3, frozenset([0]))
    rows = [(0, -1.0), (1, -1.5), (2, -2.0)]
    while not search.is_over:
        search.advance([rows] * len(search.running))
    assert len(search.ended) == 5
    assert [0] in [one.token_ids for one in search.ended]


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(beam_width=0), "beam_width must be >= 1, got 0"),
    (dict(max_tokens=0), "max_tokens must be >= 1, got 0"),
    (dict(max_tokens=None), "max_tokens must be an int"),
    (dict(temperature=0.7), r"temperature must be 0\.0, as nothing is drawn .*, got 0\.7"),
    (dict(length_penalty=float("nan")), "length_penalty must be finite"),
    (dict(length_penalty=400), r"length_penalty must be finite and in \[-30, 30\], got 400"),
    (dict(length_penalty=-400), r"length_penalty must be finite and in \[-30, 30\], got -400"),
    (dict(early_stopping="always"), "early_stopping must be True, False or 'never', got 'always'"),
    (dict(ignore_eos=1), "ignore_eos must be True or False, got 1"),
    (dict(beam_size=3), "unknown parameter of beam search 'beam_size'"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_parameters_are_named_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        BeamSearchParams(**given)


def test_bad_calls_are_named_errors(llm: LLM) -> None:
    params = params_of("plain")
    with pytest.raises(TypeError, match="params must be a BeamSearchParams, got SamplingParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must have 1 to"):
        llm.beam_search(["a", ""], params)
    with pytest.raises(ValueError, match="concurrency_limit must be >= 1, got 0"):
        llm.beam_search("a", params, concurrency_limit=0)
    audit_at_rest(llm)


def test_a_search_in_a_server_needs_raw_logprobs() -> None:
    engine: Any = SimpleNamespace(config=SimpleNamespace(logprobs_mode="raw_logits"))
    found = AsyncBeams(engine).search("a", params_of("plain"), SamplingParams(), None)
    with pytest.raises(ValueError, match="beam_search needs logprobs_mode='raw_logprobs'"):
        asyncio.run(found)


def test_an_aborted_step_is_named() -> None:
    """It has no log-probabilities."""
    sample = {"finish_reason": "abort", "stop_reason": None, "logprobs": []}

    async def output() -> Any:
        return {"outputs": [sample]}

    @contextlib.asynccontextmanager
    async def queued(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(output=output)

    accepted: Any = Accepted([1], None, SamplingParams(), None)
    engine: Any = SimpleNamespace(queued=queued)
    with pytest.raises(NotReadyError, match="a step of the search was aborted"):
        asyncio.run(AsyncBeams(engine)._likely(accepted, [], SamplingParams(), None))


def test_an_interrupt_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, wait = iter(range(9)), llm.model_runner.wait

    def interrupted(launched: Any) -> Any:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return wait(launched)

    monkeypatch.setattr(llm.model_runner, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(make_prompts(), params_of("endless"))
    monkeypatch.undo()
    assert llm.is_finished()
    audit_at_rest(llm)


@pytest.mark.cuda
def test_sequences_on_a_device(path: Path, model: Any) -> None:
    with make_llm(path, device="cuda", num_kvcache_blocks=500) as llm:
        for variant in ("plain", "early", "endless"):
            params = params_of(variant)
            for output in llm.beam_search(make_prompts(), params):
                check(output, model, params)
