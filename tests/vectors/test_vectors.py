"""Vectors equal those of transformers and sentence-transformers, however prompts are scheduled."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from audits import audit_scheduler
from reference import audit_at_rest, make_llm
from transformers import AutoModel

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.vectors import plans
from nanovllm.vectors.pooling import KeptStates

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_ERROR = 1e-5
POOLINGS = ("last", "cls", "mean", "all")
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

# Chunks of prompts, mixed steps, and pools in which sequences are preempted.
REGIMES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": dict(max_num_batched_tokens=16, kvcache_block_size=4),
    "odd chunks, mixed": dict(max_num_batched_tokens=13, scheduling="mixed", kvcache_block_size=4),
    "little memory": dict(max_num_batched_tokens=32, kvcache_block_size=4, num_kvcache_blocks=56),
    "overlapping steps": dict(
        max_num_batched_tokens=32, kvcache_block_size=4, num_kvcache_blocks=56, overlap=True
    ),
    "overlapping, mixed": dict(
        max_num_batched_tokens=13, kvcache_block_size=4, overlap=True, scheduling="mixed"
    ),
    "drafts": dict(
        max_num_batched_tokens=32, kvcache_block_size=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ),
    "no prefix cache": dict(enable_prefix_caching=False, max_num_batched_tokens=16),
}  # fmt: skip


def make_prompts() -> list[list[int]]:
    """Odd lengths, some on a common prefix, some twice."""
    rng = random.Random(3)
    prompts = [
        [rng.randrange(256) for _ in range(n)] for n in (1, 2, 3, 5, 8, 16, 17, 33, 101, 150)
    ]
    prompts += [prompts[-1][:n] + [7] * (n % 5) for n in (40, 64, 99, 100)]
    return [*prompts, list(prompts[6]), list(prompts[9])]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[torch.Tensor]:
    return states_of(model_dir, make_prompts())


@torch.inference_mode()
def states_of(path: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' states after the final norm, [tokens, hidden] for each prompt."""
    model = AutoModel.from_pretrained(path).float().eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0), "all": states}[pooling]


def check(llm: LLM, prompts: list[list[int]], expected: list[torch.Tensor], pooling: str) -> None:
    outputs = llm.encode(prompts, pooling=pooling, use_tqdm=False)
    for prompt, output, states in zip(prompts, outputs, expected, strict=True):
        assert output.prompt_token_ids == prompt
        want = pooled(states, pooling)
        assert output.outputs.data.dtype == torch.float32
        assert output.outputs.data.shape == want.shape
        error = (output.outputs.data - want).abs().max()
        assert error < MAX_ERROR, f"{pooling} of {len(prompt)} tokens differs by {error}"
    audit_at_rest(llm)


@pytest.mark.parametrize("regime", REGIMES)
def test_pooled_states_are_those_of_transformers(
    regime: str, model_dir: Path, expected: list[torch.Tensor]
) -> None:
    prompts = make_prompts()
    with make_llm(model_dir, **REGIMES[regime]) as llm:
        for pooling in (*POOLINGS, *POOLINGS):  # again, with what is cached
            check(llm, prompts, expected, pooling)
        assert not llm.requests._begun and not llm.requests.unfinished and not llm.requests.finished


@pytest.mark.parametrize("regime", REGIMES)
def test_prompts_may_have_all_tokens_that_the_model_has(regime: str, model_dir: Path) -> None:
    """One such prompt takes all blocks of the pool. To generate, there must be room for a token."""
    longest = random.Random(4).choices(range(256), k=64)
    full: dict[str, Any] = dict(max_model_len=64, kvcache_block_size=4, num_kvcache_blocks=16)
    prompts = [longest, longest[:50], longest]
    states = states_of(model_dir, prompts)
    with make_llm(model_dir, **REGIMES[regime] | full) as llm:
        for pooling in (*POOLINGS, *POOLINGS):
            check(llm, prompts, states, pooling)
        for kept in (-1, 64):
            (cut,) = llm.encode([[7, *longest]], truncate_prompt_tokens=kept, use_tqdm=False)
            assert cut.prompt_token_ids == longest
        for call, message in (
            (lambda: llm.encode([[7, *longest]]), r"1 to 64 tokens \(max_model_len=64\), got 65"),
            (lambda: llm.embed("a", truncate_prompt_tokens=65), r"at most 64 \(max_.*, got 65"),
            (lambda: llm.generate(longest), r"1 to 63 tokens \(max_model_len=64 less one to gen"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        audit_at_rest(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_vectors_are_made_while_other_prompts_are_computed(
    overlap: bool, model_dir: Path, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, and in the order of the prompts, whatever finishes first."""
    made: list[tuple[int, int, bool]] = []
    prompts = make_prompts()
    options = dict(max_num_batched_tokens=64, kvcache_block_size=4, overlap=overlap)
    with make_llm(model_dir, **options) as llm:

        def recorded(requests: list[Any], *options: Any) -> Any:
            made.append((len(requests), len(llm.requests.unfinished), llm._launched is not None))
            return embeddings(requests, *options)

        embeddings = plans._embeddings
        monkeypatch.setattr(plans, "_embeddings", recorded)
        outputs = llm.embed(prompts, use_tqdm=False)
        assert sum(number for number, _, _ in made) == len(prompts)
        assert len(made) > 3 and made[-1][1] == 0
        assert all(bool(left) for _, left, _ in made[:-1])
        assert any(flight for _, _, flight in made) == overlap
        for output, states, prompt in zip(outputs, expected, prompts, strict=True):
            assert output.prompt_token_ids == prompt
            error = torch.tensor(output.embedding) - F.normalize(states[-1], dim=-1)
            assert error.abs().max() < MAX_ERROR
        assert llm.embed([], use_tqdm=False) == [] and not llm.requests.finished


def test_two_ranks_give_the_states_of_one(model_dir: Path, expected: list[torch.Tensor]) -> None:
    options = dict(max_num_batched_tokens=48, kvcache_block_size=4, tensor_parallel_size=2)
    with make_llm(model_dir, **options) as llm:
        for pooling in POOLINGS:
            check(llm, make_prompts(), expected, pooling)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["whole", "odd chunks, mixed", "drafts"])
def test_pooled_states_on_a_device_are_those_of_transformers(
    name: str, model_dir: Path, expected: list[torch.Tensor]
) -> None:
    with make_llm(model_dir, **dict(device="cuda", num_kvcache_blocks=2000) | REGIMES[name]) as llm:
        for pooling in POOLINGS:
            check(llm, make_prompts(), expected, pooling)


def test_prompts_run_beside_requests_that_generate(
    model_dir: Path, expected: list[torch.Tensor]
) -> None:
    """In the same steps; neither changes the other, and a cached prefix is used by both."""
    prompts = make_prompts()
    for options in REGIMES.values():
        with make_llm(model_dir, **options) as llm:
            alone = [o.token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
            for pooling in POOLINGS:
                ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
                llm.step()
                check_states = llm.encode(prompts, pooling=pooling, use_tqdm=False)
                for output, states in zip(check_states, expected, strict=True):
                    assert (output.outputs.data - pooled(states, pooling)).abs().max() < MAX_ERROR
                outputs = {}
                while not llm.is_finished():
                    outputs |= {output.request_id: output for output in llm.step()}
                assert [outputs[i].token_ids for i in ids] == alone
            audit_at_rest(llm)


def test_no_logits_are_computed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(model_dir) as llm:
        monkeypatch.setattr(llm.model_runner.shard.model, "compute_logits", None)
        llm.encode(make_prompts(), use_tqdm=False)
        with pytest.raises(TypeError):
            llm.generate("a", GREEDY, use_tqdm=False)


def test_the_last_state_needs_only_what_is_not_cached(model_dir: Path) -> None:
    prompt = make_prompts()[9]
    with make_llm(model_dir, kvcache_block_size=4) as llm:
        hits = [
            llm.encode([prompt], pooling=pooling, use_tqdm=False)[0].num_cached_tokens
            for pooling in ("last", "last", "mean", "cls", "all")
        ]
        assert hits == [0, 148, 0, 0, 0]


def test_vectors_share_cached_prefixes_only_with_their_salt(llm: LLM) -> None:
    """By an option of the call, or by a key of one prompt, which an instruction keeps."""
    prompt, text = [7, 5, 3] * 30, "abcdefgh" * 10
    calls: list[Any] = [
        lambda: llm.encode([prompt], pooling="last"),
        lambda: llm.encode([prompt], pooling="last", cache_salt="a"),
        lambda: llm.encode({"prompt_token_ids": prompt, "cache_salt": "a"}, pooling="last"),
        lambda: llm.embed(text, instruction="b", cache_salt="a"),
        lambda: llm.embed(text, instruction="b"),
        lambda: llm.embed({"prompt": text, "cache_salt": "a"}, instruction="b", cache_salt="b"),
        lambda: llm.score("a" * 80, text, cache_salt="c"),
        lambda: llm.score("a" * 80, text, cache_salt="c"),
    ]
    hits = [call()[0].num_cached_tokens > 0 for call in calls]
    assert hits == [False, False, True, False, False, True, False, True]
    with pytest.raises(ValueError, match="1 to 256 characters, got 0"):
        llm.embed("a", cache_salt="")
    with pytest.raises(ValueError, match="instruction must have no cache_salt here"):
        llm.embed("a", instruction={"prompt": "b", "cache_salt": "c"})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


def test_embeddings_are_normalized_last_states(llm: LLM, expected: list[torch.Tensor]) -> None:
    prompts = make_prompts()
    for dimensions in (None, 1, 17, 64):
        for normalize in (None, True, False):
            options: dict[str, Any] = dict(dimensions=dimensions, normalize=normalize)
            outputs = llm.embed(prompts, use_tqdm=False, **options)
            for output, states in zip(outputs, expected, strict=True):
                want = states[-1, :dimensions]
                want = want if normalize is False else F.normalize(want, dim=0)
                assert output["embedding"] is output.outputs.embedding
                assert (torch.tensor(output.embedding) - want).abs().max() < MAX_ERROR


def test_prompts_have_the_forms_of_generate(llm: LLM) -> None:
    text, ids = "Hello", llm.tokenizer.encode("Hello")
    forms: list[Any] = [text, ids, [text], [ids], {"prompt": text}, {"prompt_token_ids": ids}]
    vectors = [llm.embed(form, use_tqdm=False)[0] for form in forms]
    assert all(vector.embedding == vectors[0].embedding for vector in vectors)
    assert [v.prompt for v in vectors] == [text, None, text, None, text, None]
    assert llm.embed([], use_tqdm=False) == []
    assert llm.encode([]) == [] and llm.score("a", []) == []


def test_instructions_come_before_texts(llm: LLM) -> None:
    (output,) = llm.embed("a b", instruction="Find it", use_tqdm=False)
    assert output.prompt == "Instruct: Find it\nQuery:a b"
    assert output.embedding == llm.embed(output.prompt, use_tqdm=False)[0].embedding


def test_options_in_vllms_form(llm: LLM) -> None:
    """The same as keywords; an empty form, and values that ask for nothing, change nothing."""
    prompts: list[Any] = [list(range(9)), "abc"]
    params = PoolingParams(dimensions=8, use_activation=False, truncate_prompt_tokens=3)
    wanted = dict(dimensions=8, normalize=False, truncate_prompt_tokens=3)
    assert len(prompts[0]) > 3
    for given, same in (
        (dict(pooling_params=params), wanted),
        (dict(pooling_params=PoolingParams()), {}),
        (dict(pooling_task=None, tokenization_kwargs={}), {}),
        (dict(pooling_params=PoolingParams(dimensions=8), normalize=False),
         dict(dimensions=8, normalize=False)),
    ):  # fmt: skip
        outputs = llm.embed(prompts, use_tqdm=False, **given)
        again = llm.embed(prompts, use_tqdm=False, **same)
        assert [o.embedding for o in outputs] == [o.embedding for o in again]
        assert [o.prompt_token_ids for o in outputs] == [o.prompt_token_ids for o in again]
    (states,) = llm.encode("abcd", PoolingParams(truncate_prompt_tokens=2), use_tqdm=False)
    assert states.num_prompt_tokens == 2
    (score,) = llm.score("ab", "cd", pooling_params=PoolingParams(), use_tqdm=False)
    assert score.score == llm.score("ab", "cd", use_tqdm=False)[0].score


def test_scores_are_cosines(llm: LLM) -> None:
    texts = ["a", "bc", "def"]
    vectors = torch.tensor([o.embedding for o in llm.embed(texts, use_tqdm=False)])
    want = vectors @ vectors.T
    one = [o.outputs.score for o in llm.score("a", texts, use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(one), want[0])
    each = llm.score(texts, texts[::-1], use_tqdm=False)
    torch.testing.assert_close(torch.tensor([o.score for o in each]), want.flip(1).diagonal())
    equal = [[n, 1] for n in range(250)]
    assert all(-1 <= o.score <= 1 for o in llm.score(equal, equal, use_tqdm=False))
    assert each[1].prompt_token_ids == 2 * llm.tokenizer.encode("bc")


BAD: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda llm: llm.embed(["a", ""]), r"prompts\[1\]: prompt must have 1 to"),
    (lambda llm: llm.embed([[1], [999]]), r"prompts\[1\]: prompt token id"),
    (lambda llm: llm.embed("a", dimensions=65), r"dimensions must be in \[1, 64\], got 65"),
    (lambda llm: llm.embed("a", dimensions=0), r"dimensions must be in \[1, 64\], got 0"),
    (lambda llm: llm.embed("a", normalize=1), "normalize must be True or False, got 1"),
    (lambda llm: llm.embed("a", pooling="all"), "pooling must be one of 'last', 'cls', 'mean'"),
    (lambda llm: llm.encode("a", pooling="max"), "pooling must be one of .*'all', got 'max'"),
    (lambda llm: llm.embed("a", prompt_name="query"), "prompt_name must be one of the model's"),
    (lambda llm: llm.embed("a", instruction=3), "instruction must be a text, got 3"),
    (lambda llm: llm.embed([[1]], instruction="x"), r"prompts\[0\]: .* comes before texts only"),
    (lambda llm: llm.embed("a", prompt_name="q", instruction="b"), "exclude each other"),
    (lambda llm: llm.embed("a", use_tqdm=1), "use_tqdm must be True or False, got 1"),
    (lambda llm: llm.score(["a", "b"], ["c"]), r"queries must be one or as many .* \(1\), got 2"),
    (lambda llm: llm.score("a", "b", method="bm25"), "method must be one of 'yes_no', 'cosine'"),
    (lambda llm: llm.score("a", "b", method="yes_no"), "one token for each of 'yes' and 'no'"),
    (
        lambda llm: llm.score("a", "b", lora_request=[None] * 2),
        "lora_request must be a LoRARequest",
    ),
    (
        lambda llm: llm.embed("a", pooling_params=SamplingParams()),
        r"pooling_params must be a PoolingParams, got SamplingParams\(",
    ),
    (
        lambda llm: llm.embed("a", pooling_params=[PoolingParams()]),
        r"pooling_params must be a PoolingParams, got \[",
    ),
    (
        lambda llm: llm.embed("a", dimensions=8, pooling_params=PoolingParams(dimensions=9)),
        "dimensions and pooling_params with dimensions=9; give one of them",
    ),
    (
        lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=65)),
        r"dimensions must be in \[1, 64\], got 65",
    ),
    (
        lambda llm: llm.encode("a", PoolingParams(dimensions=8)),
        "pooling_params: dimensions must be None for encode, got 8",
    ),
    (
        lambda llm: llm.score("a", "b", pooling_params=PoolingParams(use_activation=False)),
        "pooling_params: normalize must be None for score, got False",
    ),
    (lambda llm: llm.encode("a", pooling_task="token_embed"), "pooling_task='token_embed': embed"),
    (lambda llm: llm.embed("a", dimension=8), "embed: unknown option 'dimension'; did you mean 'd"),
    (lambda llm: llm.encode("a", normalise=True), "encode: unknown option 'normalise'$"),
    (lambda llm: llm.score("a", "b", top_n=1), "score: unknown option 'top_n'$"),
    (lambda llm: llm.score("a", [[1], "b\ud800"]), r"documents\[1\]: prompt is not valid Unicode"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_a_named_error(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(llm)
    assert llm.is_finished()
    audit_at_rest(llm)


def test_no_vector_is_made_of_a_part_of_a_prompt(model_dir: Path) -> None:
    """Its request is aborted while weights are replaced."""
    with make_llm(model_dir, max_num_batched_tokens=16) as llm:
        plan = llm.parts.vectors.planner.encode([[1] * 40], "mean")
        request = llm.requests.unfinished[llm.enqueue(plan.accepted[0])]
        llm.step()
        llm.reload_weights(running="abort")
        with pytest.raises(NotReadyError, match="a request was aborted before"):
            plan.outputs([request])


def test_an_interrupt_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    wait = llm.model_runner.wait

    def interrupted(launched: Any) -> Any:
        if next(steps) == 1:
            raise KeyboardInterrupt
        return wait(launched)

    monkeypatch.setattr(llm.model_runner, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.encode([[1] * 500] * 60, use_tqdm=False)
    monkeypatch.undo()
    assert llm.is_finished() and not llm.requests._begun
    audit_at_rest(llm)
    assert len(llm.embed("a", use_tqdm=False)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_beside_requests_that_generate(
    seed: int, model_dir: Path, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Priorities, aborts, restarts, and preemptions as if blocks had run out."""
    rng, prompts = random.Random(seed), make_prompts()
    options: dict[str, Any] = dict(
        max_num_batched_tokens=rng.choice([11, 40]), kvcache_block_size=4, num_kvcache_blocks=60,
        overlap=seed % 2 == 1, scheduling=rng.choice(["mixed", "prefill-first"]),
        enable_prefix_caching=seed % 3 > 0,
    )  # fmt: skip
    with make_llm(model_dir, **options) as llm:
        scheduler, schedule_prefill = llm.scheduler, llm.scheduler._schedule_prefill

        def preempting(budget: int, decodes: list[Sequence]) -> tuple[list[Sequence], int]:
            if len(scheduler.running) > 1 and rng.random() < 0.15:
                if decodes and decodes[-1] is scheduler.running[-1]:
                    decodes.pop()
                scheduler.preempt(scheduler.running[-1])
            return schedule_prefill(budget, decodes)

        monkeypatch.setattr(scheduler, "_schedule_prefill", preempting)
        wanted: dict[int, tuple[int, str]] = {}
        pools: dict[int, KeptStates] = {}
        done = 0
        for _ in range(250):
            if rng.random() < 0.5 and len(llm.requests.unfinished) < 16:
                index, pooling = rng.randrange(len(prompts)), rng.choice(POOLINGS)
                params = dataclasses.replace(
                    GREEDY, priority=rng.randrange(3), max_tokens=rng.choice([5, 30])
                )
                accepted = llm.intake.accept(prompts[index], params)
                if rng.random() < 0.6:
                    pool = KeptStates(pooling, len(prompts[index]))
                    request_id = llm.enqueue(dataclasses.replace(accepted, keeper=pool))
                    wanted[request_id], pools[request_id] = (index, pooling), pool
                else:
                    llm.enqueue(accepted)
            if llm.requests.unfinished and rng.random() < 0.05:
                llm.abort_request(rng.choice([*llm.requests.unfinished]))
            if rng.random() < 0.03:
                llm.recover(llm.requests.all)
            if llm.requests.unfinished:
                llm.alone(llm.advance)
            audit_scheduler(llm.scheduler)
            for request_id in [*llm.requests.finished]:
                if request_id in wanted:
                    index, pooling = wanted[request_id]
                    result = torch.from_numpy(pools[request_id].result)
                    error = result - pooled(expected[index], pooling)
                    assert error.abs().max() < MAX_ERROR
                    assert not llm.requests.finished[request_id].seqs[0].output_token_ids
                    done += 1
                llm.requests.drop_output(request_id)
        assert done > 5
        assert llm.stats().num_preemptions > 10
