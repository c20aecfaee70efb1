"""Output with drafts equals output without them, whatever the drafts are.

It costs more than 20 seconds: answers are computed with drafts and without.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_scheduler
from conftest import make_model, need_gpus
from drafts import Adversary, speculate, speculate_in_table, use_graphs
from reference import (
    HARD,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_logits,
    generate,
    make_case,
    make_llm,
    make_prompts,
)

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.costs import GraphCosts, TokenCosts
from nanovllm.drafting.paced_drafting import PacedDrafting
from nanovllm.drafting.step_times import time_graphs
from nanovllm.drafting.table_drafting import TableDrafting
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

VOCAB_SIZE = 259
PROMPTS = make_prompts()[:30]
REGIMES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "budget 16, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "three at a time": dict(max_num_seqs=3),
    "no prefix cache, small pool": dict(SMALL_POOL, enable_prefix_caching=False),
    "small pool, budget 16": HARD,
    "overlap, small pool, budget 16": dict(HARD, overlap=True),
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "mixed, budget 60": dict(scheduling="mixed", max_num_batched_tokens=60),
}
# Drafts are further queries of their rows in the device table, as on a GPU.
ROWS: dict[str, Any] = dict(
    attention_backend="torch",
    speculative_config={"method": "ngram", "num_speculative_tokens": 5},
)
REGIMES |= {
    "rows": ROWS,
    "rows, three at a time": dict(ROWS, max_num_seqs=3),
    "rows, overlap, small pool, budget 16": dict(HARD, **ROWS, overlap=True),
    "rows, mixed, small pool, budget 16": dict(HARD, **ROWS, scheduling="mixed"),
}
MODELS: dict[str, dict[str, Any]] = {
    "a window in every other layer": dict(
        use_sliding_window=True, sliding_window=20, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "a window": dict(family="Mistral", sliding_window=9),
    "experts": dict(
        family="Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}  # fmt: skip
# One request after the other has these.
PARAMS: list[dict[str, Any]] = [
    dict(temperature=1.0), dict(temperature=3.0, top_k=20), dict(top_p=0.9), dict(min_p=0.02),
    dict(temperature=0, min_tokens=9, stop_token_ids=list(range(200))),
    dict(min_tokens=4, stop_token_ids=list(range(100, 259)), logprobs=2),
    dict(temperature=0, logprobs=3, prompt_logprobs=1), dict(logit_bias={5: 4.0, 6: -50.0}, n=3),
    dict(allowed_token_ids=list(range(40, 90)), stop=["a", "PQ"]),
    dict(repetition_penalty=1.3, bad_words=["zz"]),
]  # fmt: skip
A, B, C = 64, 65, 66  # as tokens
# What may be drawn depends on the tokens before. Where few are allowed, drafts begin and complete
# bad words all the time.
READERS: list[dict[str, Any]] = [
    dict(temperature=0, repetition_penalty=1.5), dict(temperature=0, frequency_penalty=1.0, n=2),
    dict(presence_penalty=1.5, frequency_penalty=-0.4, top_k=30),
    dict(temperature=0, allowed_token_ids=[A, B, C], frequency_penalty=0.7, logprobs=2),
    dict(temperature=2.0, allowed_token_ids=range(A, A + 12), presence_penalty=2.0),
    dict(temperature=0, bad_words=["a", "zz"], min_tokens=20, stop_token_ids=list(range(30, 250))),
    dict(temperature=0, allowed_token_ids=[A, B, C], bad_words=["a", "bb", "cbc"]),
    dict(temperature=0, allowed_token_ids=[A, B], bad_words=["aaa", "bbb", "baba"]),
    dict(allowed_token_ids=[A, B, C], bad_words=["ab", "bca", "ccc"], logit_bias={C: 2.0}, n=2),
    dict(allowed_token_ids=[A, B, C], bad_words=["aa", "acc"], repetition_penalty=0.8, stop="bcb"),
]  # fmt: skip


def sampled_params(choices: list[dict[str, Any]] = PARAMS) -> list[SamplingParams]:
    """Parameters for each of the prompts: every one of `choices`, with a seed."""
    shared: dict[str, Any] = dict(max_tokens=24)
    return [
        SamplingParams(
            **{**shared, **choices[i % len(choices)], "seed": i, "ignore_eos": i % 2 == 0}
        )
        for i in range(len(PROMPTS))
    ]


def known_outputs(
    prompts: list[list[int]], outputs: list[list[list[int]]]
) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """What each sample of a prompt is; of equal prompts only the last one's are known."""
    return {
        (tuple(prompt), index): token_ids
        for prompt, samples in zip(prompts, outputs, strict=True)
        for index, token_ids in enumerate(samples)
    }


def all_samples(outputs: list[RequestOutput]) -> list[Any]:
    """What users see of each sample; log-probabilities without their last digits."""
    return [
        [
            (
                one.token_ids, one.text, one.finish_reason, one.stop_reason,
                one["logprobs"] and [[(t.token_id, round(t.logprob, 3)) for t in step[:2]]
                                     for step in one["logprobs"]],
            )
            for one in output.outputs
        ]
        for output in outputs
    ]  # fmt: skip


def generate_twice(
    llm: LLM, params: list[SamplingParams], seed: int
) -> tuple[list[RequestOutput], list[RequestOutput], PacedDrafting]:
    """Outputs without drafts, then with drafts of an adversary that knows them."""
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    ids = [[one.token_ids for one in output.outputs] for output in expected]
    drafting = speculate(llm, Adversary(seed, VOCAB_SIZE, known_outputs(PROMPTS, ids)))
    return expected, llm.generate(PROMPTS, params, use_tqdm=False), drafting


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


def adversary_of(case: Case, seed: int) -> Adversary:
    known = known_outputs(case.prompts, [[tokens] for tokens in case.tokens])
    return Adversary(seed, VOCAB_SIZE, known)


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("name", REGIMES)
def test_greedy_drafts_keep_what_transformers_generates(name: str, standard: Case) -> None:
    """The adversary knows the tokens after the end, too."""
    with make_llm(standard.path, **REGIMES[name]) as llm:
        drafting = speculate(llm, adversary_of(standard, seed=len(name)))
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)
        assert 30 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        assert_same(generate(llm, standard), standard.expected)  # from the cache
        assert llm.stats()["prefix_cache_hits"] > 0 or not llm.config.enable_prefix_caching


# Where the device guesses and accepts, a step is launched before it is known how far the last came.
TABLE_REGIMES: dict[str, dict[str, Any]] = {
    "all at once": ROWS,
    "overlap": dict(ROWS, overlap=True),
    "overlap, blocks of 4": dict(ROWS, overlap=True, kvcache_block_size=4),
    "overlap, three at a time": dict(ROWS, overlap=True, max_num_seqs=3),
    "overlap, small pool, budget 16": dict(HARD, **ROWS, overlap=True),
    "overlap, small pool": dict(SMALL_POOL, **ROWS, overlap=True),
    "overlap, no prefix cache": dict(ROWS, overlap=True, enable_prefix_caching=False),
    "mixed, overlap, small pool": dict(HARD, **ROWS, scheduling="mixed", overlap=True),
}


def known_texts(prompts: list[list[int]], outputs: list[list[list[int]]]) -> list[list[int]]:
    """Each prompt with each of its outputs."""
    return [
        prompt + token_ids
        for prompt, samples in zip(prompts, outputs, strict=True)
        for token_ids in samples
    ]


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", TABLE_REGIMES)
def test_guesses_of_the_device_keep_what_transformers_generates(
    name: str, graphs: bool, standard: Case
) -> None:
    with make_llm(standard.path, **TABLE_REGIMES[name]) as llm:
        texts = known_texts(standard.prompts, [[tokens] for tokens in standard.tokens])
        drafting, guesser = speculate_in_table(llm, texts, len(name), VOCAB_SIZE)
        if graphs:
            use_graphs(llm)
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)
        assert guesser.num_guesses > 100
        assert 30 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        assert_same(generate(llm, standard), standard.expected)  # from the cache


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", TABLE_REGIMES)
def test_guesses_of_the_device_keep_every_output(name: str, model_dir: Path) -> None:
    """Beside sequences whose tokens the host must know, and all that narrows a draw."""
    params = sampled_params([*PARAMS, *PARAMS[:4], *READERS])
    with make_llm(model_dir, **TABLE_REGIMES[name]) as llm:
        llm.scheduler.drafting = Drafting()
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        ids = [[one.token_ids for one in output.outputs] for output in expected]
        drafting, guesser = speculate_in_table(llm, known_texts(PROMPTS, ids), 3, VOCAB_SIZE)
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        assert all_samples(got) == all_samples(expected)
        assert guesser.num_guesses > 50
        assert 50 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        audit_at_rest(llm)


def test_steps_with_guesses_overlap(model_dir: Path) -> None:
    """The next one is launched before the tokens of the last are known."""
    with make_llm(model_dir, **ROWS, overlap=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
        expected = [output.token_ids for output in outputs]
        texts = known_texts(PROMPTS[:3], [[token_ids] for token_ids in expected])
        speculate_in_table(llm, texts, 1, VOCAB_SIZE)
        scheduler = llm.scheduler
        must_wait, waits = scheduler.must_wait, []
        scheduler.must_wait = lambda batch: waits.append(must_wait(batch)) or waits[-1]  # type: ignore
        assert_same(llm.generate(PROMPTS[:3], params, use_tqdm=False), expected)
        assert len(waits) > 5 and not any(waits)


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, HARD, ROWS])
def test_greedy_drafts_keep_the_output_of_models_with(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = make_case(make_model(tmp_path, seed=1, **MODELS[name]), make_prompts())
    with make_llm(case.path, **options) as llm:
        drafting = speculate(llm, adversary_of(case, seed=3))
        assert_same(generate(llm, case), case.expected)
        assert sum(drafting.accepted_at) > 30
        audit_at_rest(llm)


def test_logits_after_drafts_equal_transformers(
    standard: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each accepted token is drawn from the logits after the tokens before it."""
    made = LLM.__init__

    def speculating(self: LLM, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        speculate(self, adversary_of(standard, seed=1))

    monkeypatch.setattr(LLM, "__init__", speculating)
    check_logits(standard, **HARD)


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, scheduling="mixed"), ROWS])
def test_sampled_drafts_keep_every_output(options: dict[str, Any], model_dir: Path) -> None:
    """Stops, texts, log-probabilities, several samples: with right drafts and wrong ones."""
    params = sampled_params()
    with make_llm(model_dir, **options) as llm:
        expected, got, drafting = generate_twice(llm, params, seed=5)
        assert all_samples(got) == all_samples(expected)
        assert [output.prompt_logprobs is None for output in got] == [
            output.prompt_logprobs is None for output in expected
        ]
        assert 100 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        audit_at_rest(llm)


@pytest.mark.parametrize(
    "options",
    [{}, HARD, dict(SMALL_POOL, overlap=True), dict(HARD, scheduling="mixed", overlap=True), ROWS],
)
def test_penalties_and_bad_words_count_right_drafts(
    options: dict[str, Any], model_dir: Path
) -> None:
    """Each token is drawn as after the drafts before it; wrong drafts leave no counts behind."""
    params = sampled_params(READERS)
    with make_llm(model_dir, **options) as llm:
        expected, got, drafting = generate_twice(llm, params, seed=7)
        assert all_samples(got) == all_samples(expected)
        assert 100 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        audit_at_rest(llm)


@pytest.mark.parametrize("max_num_seqs", [6, 48])
def test_graphs_keep_every_output(max_num_seqs: int, model_dir: Path) -> None:
    """Steps are padded, in sequences and in drafts; larger ones run without graphs."""
    params = sampled_params(PARAMS + READERS)
    with make_llm(model_dir, **ROWS, max_num_seqs=max_num_seqs) as llm:
        llm.scheduler.drafting = Drafting()
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        ids = [[one.token_ids for one in output.outputs] for output in expected]
        shard = llm.model_runner.shard
        shard.graphs = graphs = shard.decode_graphs(max_num_seqs)
        step, sizes = graphs.step, set()

        def recording(size: Size, out: torch.Tensor) -> Computed:
            sizes.add(size)
            return step(size, out)

        graphs.step = recording
        drafting = speculate(llm, Adversary(7, VOCAB_SIZE, known_outputs(PROMPTS, ids)))
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        assert all_samples(got) == all_samples(expected)
        assert sum(drafting.accepted_at) > 100
        assert {size.num_queries for size in sizes} == {1, 2, 3, 6}
        audit_at_rest(llm)


@pytest.mark.parametrize("options", [{}, ROWS])
def test_two_ranks_keep_every_output(options: dict[str, Any], model_dir: Path) -> None:
    params = sampled_params(PARAMS + READERS)
    with make_llm(model_dir, tensor_parallel_size=2, **options) as llm:
        llm.scheduler.drafting = Drafting()
        expected, got, drafting = generate_twice(llm, params, seed=5)
        assert all_samples(got) == all_samples(expected)
        assert sum(drafting.accepted_at) > 50


@pytest.mark.parametrize("options", [{}, dict(attention_backend="torch"), ROWS])
def test_drafts_with_an_fp8_cache(options: dict[str, Any], standard: Case) -> None:
    """Equal except for codes that rounding decides: see test_fp8_kv.py."""
    with make_llm(standard.path, kv_cache_dtype="fp8", **options) as llm:
        expected = [output.token_ids for output in generate(llm, standard)]
        known = known_outputs(standard.prompts, [[tokens] for tokens in expected])
        drafting = speculate(llm, Adversary(3, VOCAB_SIZE, known))
        got = [output.token_ids for output in generate(llm, standard)]
        same = sum(one == other for one, other in zip(got, expected, strict=True))
        assert same >= 0.9 * len(expected) and sum(drafting.accepted_at) > 100


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize(
    "options",
    [{}, dict(SMALL_POOL, overlap=True), dict(attention_backend="torch", overlap=True),
     dict(attention_backend="torch", overlap=True, tensor_parallel_size=2)],
)  # fmt: skip
def test_ngrams_keep_every_output(options: dict[str, Any], model_dir: Path) -> None:
    """The option, from end to end: some texts repeat themselves, others do not."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True,
            allowed_token_ids=None if i % 3 else [5 + i, 6 + i],
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    with make_llm(model_dir, **options) as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make_llm(model_dir, **options, speculative_config=ngram) as llm:
        got = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, params, strict=True)]
        assert all_samples(got) == all_samples(expected)
        assert llm.stats().accepted_tokens > 50
        assert all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) == all_samples(expected)
        audit_at_rest(llm)


def test_a_stream_of_drafts_has_the_pieces_of_the_output(model_dir: Path) -> None:
    """An event may have several tokens, none that was not accepted."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=2, stop=["q", "zz"])
    with make_llm(model_dir, **SMALL_POOL) as llm:
        (out,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        ids = [[one.token_ids for one in out.outputs]]
        speculate(llm, Adversary(2, VOCAB_SIZE, known_outputs([[3, 4, 5]], ids)))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        texts, sizes = {0: "", 1: ""}, []
        for event in llm.stream([[3, 4, 5]], params):
            tokens[event["sample"]] += event["token_ids"]
            texts[event["sample"]] += event["text"]
            sizes.append(len(event["token_ids"]))
        assert tokens == {one.index: one.token_ids for one in out.outputs}
        assert texts == {one.index: one.text for one in out.outputs}
        assert max(sizes) > 1
        audit_at_rest(llm)


def test_an_error_between_launch_and_tokens_keeps_the_output(
    standard: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences start over with the tokens that they have, and no places for others."""
    with make_llm(standard.path, **SMALL_POOL) as llm:
        speculate(llm, adversary_of(standard, seed=4))
        wait, steps = llm.model_runner.wait, 0

        def failing(launched: Any) -> list[int]:
            nonlocal steps
            steps += 1
            if steps % 5 == 0:
                raise InterruptedError
            return wait(launched)

        monkeypatch.setattr(llm.model_runner, "wait", failing)
        pairs = zip(standard.prompts[:12], standard.params[:12], strict=True)
        ids = [llm.add_request(prompt, params) for prompt, params in pairs]
        outputs = {}
        while not llm.is_finished():
            try:
                for output in llm.step():
                    outputs[output.request_id] = output
            except InterruptedError:
                assert all(not seq.num_pending_tokens for seq in llm.scheduler.waiting)
            audit_scheduler(llm.scheduler)
        assert_same([outputs[i] for i in ids], standard.expected[:12])
        audit_at_rest(llm)


def test_aborts_between_steps_leave_the_others_alone(standard: Case) -> None:
    with make_llm(standard.path, **SMALL_POOL, overlap=True, scheduling="mixed") as llm:
        speculate(llm, adversary_of(standard, seed=6))
        pairs = zip(standard.prompts, standard.params, strict=True)
        ids = [llm.add_request(prompt, params) for prompt, params in pairs]
        outputs, step = {}, 0
        victims = ids[::4]
        while not llm.is_finished():
            step += 1
            if step % 3 == 0 and victims and (victim := victims.pop()) in llm.requests.unfinished:
                tokens = llm.abort_request(victim).token_ids
                assert tokens == standard.expected[ids.index(victim)][: len(tokens)]
            for output in llm.step():
                outputs[output.request_id] = output
            audit_scheduler(llm.scheduler)
        kept = [i for i in ids if i in outputs]
        assert 10 < len(kept) < len(ids)
        assert_same([outputs[i] for i in kept], [standard.expected[ids.index(i)] for i in kept])
        audit_at_rest(llm)


def test_the_graphs_of_steps_with_drafts_are_timed(model_dir: Path) -> None:
    """Before anything runs; the table is as new afterwards."""
    params = SamplingParams(max_tokens=9, temperature=0)
    with make_llm(model_dir, **ROWS, max_num_seqs=6, enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        shard = llm.model_runner.shard
        shard.graphs = shard.decode_graphs(6)
        llm.model_runner.recover()
        with shard.computing():
            seconds = time_graphs(shard)
        assert {Size(4), Size(6), Size(6, 6), Size(1, 3), Size(2, 2)} < seconds.keys()
        assert all(0 < value < 1 for value in seconds.values())
        again = llm.generate(PROMPTS, params, use_tqdm=False)
        assert all_samples(again) == all_samples(expected)


@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed"])
def test_only_mixed_steps_wait_for_steps_with_drafts(scheduling: str, model_dir: Path) -> None:
    """Their host must know how many tokens there are. Most have prompts, so no drafts."""
    options: dict[str, Any] = dict(ROWS, overlap=True, max_num_seqs=8, max_num_batched_tokens=16)
    with make_llm(model_dir, **options, scheduling=scheduling) as llm:
        scheduler = llm.scheduler
        assert isinstance(scheduler.drafting, TableDrafting)
        times = {Size(n, q): 1 + 0.01 * q for n in (1, 2, 4, 8) for q in (1, 2, 3, 6)}
        scheduler.drafting.costs = GraphCosts(times)
        must_wait, steps = scheduler.must_wait, list[tuple[bool, bool]]()  # waits, has drafts

        def noted(batch: Batch) -> bool:
            steps.append((must_wait(batch), bool(batch.num_drafts)))
            return steps[-1][0]

        scheduler.must_wait = noted  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
        prompts = [[i] * 3 + list(range(90)) for i in range(40)]
        llm.generate(prompts, params, use_tqdm=False)
        mixes = scheduling == "mixed"
        assert all(waits == (has_drafts and mixes) for waits, has_drafts in steps)
        assert 10 < sum(has_drafts for _, has_drafts in steps) < 0.9 * len(steps)


def test_texts_without_ngrams_do_not_keep_steps_waiting(model_dir: Path) -> None:
    """The host must know how many there are, so that drafts are tried less and less often."""
    with make_llm(model_dir, **ROWS, overlap=True) as llm:
        scheduler = llm.scheduler
        assert isinstance(scheduler.drafting, TableDrafting)
        scheduler.drafting.costs = GraphCosts(
            {Size(n, q): 1 + 0.01 * q for n in (1, 4) for q in (1, 2, 3, 6)}
        )
        must_wait, waits = scheduler.must_wait, list[bool]()

        def noted(batch: Batch) -> bool:
            waits.append(must_wait(batch))
            return waits[-1]

        scheduler.must_wait = noted  # type: ignore[method-assign]
        params = SamplingParams(temperature=5.0, seed=1, max_tokens=60, ignore_eos=True, logprobs=1)
        llm.generate([[i, i + 1, i + 2] for i in (10, 20, 30, 40)], params, use_tqdm=False)
        assert len(waits) > 50 and sum(waits) < 30


def test_counts_leave_out_what_came_after_a_stop(model_dir: Path) -> None:
    """The device accepts drafts after a stop; they are no tokens of the request."""
    with make_llm(model_dir, **ROWS, overlap=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (whole,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        tokens = whole.token_ids
        stop = next(t for i, t in enumerate(tokens) if 9 < i < 30 and t not in tokens[:i])
        length = tokens.index(stop) + 1
        params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop])
        for seed in range(8):
            speculate_in_table(llm, [PROMPTS[0] + tokens], seed, VOCAB_SIZE)
            before = llm.stats().decode_tokens
            (out,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
            assert len(out.token_ids) == length
            assert llm.stats().decode_tokens - before <= length


@pytest.mark.parametrize("window", [None, 9])
def test_texts_that_the_device_guessed_are_found_in_the_cache(
    window: int | None, tmp_path: Path
) -> None:
    """A sequence may end while a later step counts one more token, which is never computed."""
    options: dict[str, Any] = dict(family="Mistral", sliding_window=window)
    path = make_model(tmp_path, seed=1, **options)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    with make_llm(path, **ROWS, overlap=True, kvcache_block_size=4) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        texts = known_texts(PROMPTS, [[one.token_ids] for one in expected])
        longer = [[*text, 7] for text in texts]
        with make_llm(path, attention_backend="torch", enable_prefix_caching=False) as plain:
            follow_ups = [one.token_ids for one in plain.generate(longer, params, use_tqdm=False)]
        llm.scheduler.restart([])
        llm.model_runner.recover()
        speculate_in_table(llm, texts, 2, VOCAB_SIZE)
        for start in range(0, len(PROMPTS), 3):
            part = slice(start, start + 3)
            assert_same(
                llm.generate(PROMPTS[part], params, use_tqdm=False),
                [one.token_ids for one in expected[part]],
            )
            hits = llm.stats().prefix_cache_hits
            assert_same(llm.generate(longer[part], params, use_tqdm=False), follow_ups[part])
            assert llm.stats().prefix_cache_hits > hits


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), HARD, dict(HARD, scheduling="mixed"), dict(max_num_seqs=3),
     dict(attention_backend="torch"), dict(tensor_parallel_size=2)],
)  # fmt: skip
def test_a_gpu_keeps_every_output(options: dict[str, Any], model_dir: Path) -> None:
    need_gpus(options.get("tensor_parallel_size", 1))
    gpu: dict[str, Any] = dict(device="cuda", gpu_memory_utilization=0.05, kvcache_block_size=16)
    gpu |= dict(options, speculative_config=ROWS["speculative_config"])
    params = sampled_params(PARAMS + READERS)
    with make_llm(model_dir, **gpu) as llm:
        drafting, llm.scheduler.drafting = llm.scheduler.drafting, Drafting()
        assert isinstance(drafting, TableDrafting)
        assert isinstance(drafting.costs, GraphCosts if llm.model_runner.shard.graphs
                          else TokenCosts)  # fmt: skip
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
        ids = [[one.token_ids for one in output.outputs] for output in expected]
        drafting = speculate(llm, Adversary(5, VOCAB_SIZE, known_outputs(PROMPTS, ids)))
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [[one.token_ids for one in output.outputs] for output in got] == ids
        assert [[one.finish_reason for one in output.outputs] for output in got] == [
            [one.finish_reason for one in output.outputs] for output in expected
        ]
        assert sum(drafting.accepted_at) > 30
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [dict(max_num_seqs=1), dict(max_num_seqs=8), dict(enforce_eager=True, overlap=True),
     dict(SMALL_POOL), dict(tensor_parallel_size=2)],
)  # fmt: skip
def test_ngrams_on_a_gpu(options: dict[str, Any], model_dir: Path) -> None:
    """A step of so small a model is too short for wrong drafts: costs are replaced.

    Few tokens are allowed, or one is very likely, so that many drafts are right.
    """
    need_gpus(options.get("tensor_parallel_size", 1))
    gpu: dict[str, Any] = dict(device="cuda", gpu_memory_utilization=0.05, kvcache_block_size=16)
    gpu |= options
    choices: list[dict[str, Any]] = [
        dict(temperature=0, allowed_token_ids=[5, 6, 9]), dict(temperature=0),
        dict(temperature=0.3), dict(temperature=1.0, allowed_token_ids=[7, 8]),
        dict(temperature=0.5, top_k=2), dict(temperature=0, logit_bias={44: 9.0}, logprobs=1),
        dict(temperature=0, allowed_token_ids=[5, 6], presence_penalty=0.5),
        dict(temperature=0, allowed_token_ids=[5, 6], min_tokens=30),
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=60, ignore_eos=i % 2 == 0, seed=i, **choices[i % len(choices)])
        for i in range(16)
    ]
    with make_llm(model_dir, **gpu) as plain:
        expected = plain.generate(PROMPTS[:16], params, use_tqdm=False)
    with make_llm(model_dir, **gpu, speculative_config={"method": "ngram"}) as llm:
        assert isinstance(llm.scheduler.drafting, TableDrafting)
        llm.scheduler.drafting.costs = TokenCosts()
        for _ in range(2):
            got = llm.generate(PROMPTS[:16], params, use_tqdm=False)
            assert [one.token_ids for one in got] == [one.token_ids for one in expected]
        pairs = zip(PROMPTS[:16], params, strict=True)
        alone = [llm.generate(*pair, use_tqdm=False)[0] for pair in pairs]
        assert [one.token_ids for one in alone] == [one.token_ids for one in expected]
        assert llm.stats().accepted_tokens > 100
        audit_at_rest(llm)
