"""A draft model: output stays the same, its drafts are what it would generate, nothing is twice.

It costs more than 20 seconds: drafts and answers of many models are computed twice.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_scheduler
from conftest import edit_config, make_model, need_gpus
from drafts import drafting_of, make_eager, use_graphs
from reference import (
    HARD,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    generate,
    make_case,
    make_llm,
    make_some_prompts,
)
from safetensors.torch import load_file, save_file
from test_exact_drafts import MODELS, PROMPTS, READERS, REGIMES, all_samples, sampled_params

from nanovllm import LLM, SamplingParams
from nanovllm.drafting.costs import Candidate, TokenCosts
from nanovllm.drafting.draft_model import DraftModelGuesser
from nanovllm.drafting.pace import Pace
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_some_prompts())


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that guesses badly."""
    return make_model(tmp_path_factory.mktemp("small"), seed=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def near_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard model with other weights by a little: some of its guesses are right."""
    path = tmp_path_factory.mktemp("near")
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    changed = {k: v + 0.04 * v.std() * torch.randn(v.shape) for k, v in weights.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make(path: Path, draft: Path, keys: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine in which all sequences get as many drafts as fit.

    Of many sequences none would get some where the budget is small.
    """
    if "max_num_batched_tokens" in options:
        options = {"max_num_seqs": 3, **options}
    config = {"model": str(draft), "num_speculative_tokens": NUM_DRAFTS, **(keys or {})}
    return make_eager(path, config, **options)


def guesser_of(llm: LLM) -> DraftModelGuesser:
    guesser = llm.model_runner.shard.drafting
    assert isinstance(guesser, DraftModelGuesser)
    return guesser


class AnyNumber:
    """Costs by which a step has any number of drafts, often none."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def worthwhile(
        self, candidates: list[Candidate], num_tokens: int, waits: bool
    ) -> Iterator[int]:
        del num_tokens, waits
        number = self.rng.choice([0, 0, 0, 1, 2, NUM_DRAFTS])
        return (min(number, candidate.limit) for candidate in candidates)


def count_catch_ups(llm: LLM) -> list[int]:
    """How many tokens the draft model computes each time before a step."""
    counts, shard = [], llm.model_runner.shard
    catch_up = shard.catch_up

    def counting(inputs: StepInputs) -> None:
        assert inputs.prefill is not None
        counts.append(len(inputs.prefill.input_ids))
        catch_up(inputs)

    shard.catch_up = counting  # type: ignore[method-assign]
    return counts


def endless(number: int, *, max_tokens: int = 16, sampled: bool = True) -> list[SamplingParams]:
    """Every other one greedy, if they are not all."""
    return [
        SamplingParams(temperature=i % 2 * sampled, seed=i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(number)
    ]


@pytest.fixture(scope="module")
def endless_outputs(model_dir: Path) -> list[list[int]]:
    with make_llm(model_dir) as plain:
        outputs = plain.generate(PROMPTS, endless(len(PROMPTS)), use_tqdm=False)
    return [one.token_ids for one in outputs]


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize("name", REGIMES)
def test_drafts_of_the_model_itself_are_all_right(
    name: str, toggles: bool, graphs: bool, model_dir: Path, endless_outputs: list[list[int]]
) -> None:
    """Whatever became of the blocks, and also after steps that the draft model does not see."""
    with make(model_dir, model_dir, **REGIMES[name]) as llm:
        drafting = drafting_of(llm)
        if toggles:
            drafting.costs = AnyNumber(len(name))
        if graphs:
            use_graphs(llm)
        for _ in range(2):  # then from the cache
            got = llm.generate(PROMPTS, endless(len(PROMPTS)), use_tqdm=False)
            assert_same(got, endless_outputs)
            audit_at_rest(llm)
        assert sum(drafting.accepted_at) == drafting.num_drafted > 100


@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, scheduling="mixed", overlap=True)])
def test_greedy_drafts_keep_what_transformers_generates(
    options: dict[str, Any], standard: Case
) -> None:
    with make(standard.path, standard.path, **options) as llm:
        assert_same(generate(llm, standard), standard.expected)
        drafting = drafting_of(llm)
        assert 60 < sum(drafting.accepted_at) > 0.9 * drafting.num_drafted


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, scheduling="mixed", overlap=True)])
def test_wrong_drafts_keep_the_output(
    options: dict[str, Any], standard: Case, near_dir: Path
) -> None:
    with make(standard.path, near_dir, **options) as llm:
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)
        drafting = drafting_of(llm)
        rate = sum(drafting.accepted_at) / drafting.num_drafted
        assert 0.1 < rate < 0.9 and min(drafting.accepted_at) > 5


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("options", [{}, HARD, dict(tensor_parallel_size=2)])
def test_sampled_drafts_keep_every_output(
    options: dict[str, Any], is_own: bool, model_dir: Path, near_dir: Path
) -> None:
    """Filters, stops, texts, log-probabilities, several samples. Drafts after a stop are lost."""
    params = sampled_params()
    with make_llm(model_dir, **options) as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make(model_dir, model_dir if is_own else near_dir, **options) as llm:
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        assert all_samples(got) == all_samples(expected)
        assert [o.prompt_logprobs is None for o in got] == [
            o.prompt_logprobs is None for o in expected
        ]
        drafting = drafting_of(llm)
        if is_own:
            assert sum(drafting.accepted_at) > 0.4 * drafting.num_drafted
        assert sum(drafting.accepted_at) > 50
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    "options", [{}, dict(HARD, overlap=True), dict(SMALL_POOL, tensor_parallel_size=2)]
)
def test_penalties_and_bad_words_keep_every_output(
    options: dict[str, Any], is_own: bool, model_dir: Path, near_dir: Path
) -> None:
    """The large model's draws count the drafts before them; the draft model draws without."""
    params = sampled_params(READERS)
    with make_llm(model_dir, **options) as plain:
        plain.scheduler.drafting = Drafting()
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make(model_dir, model_dir if is_own else near_dir, **options) as llm:
        assert all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) == all_samples(expected)
        drafting = drafting_of(llm)
        assert 100 < sum(drafting.accepted_at) < 0.9 * drafting.num_drafted
        audit_at_rest(llm)


def note_drafts(llm: LLM) -> dict[tuple[int, int], list[int]]:
    """The drafts of each step, by the sequence's seed and its number of tokens."""
    noted: dict[tuple[int, int], list[int]] = {}
    guesser = guesser_of(llm)
    guess = guesser.guess

    def noting(table: TableState, size: Size) -> None:
        guess(table, size)
        if size.num_queries == 1:
            return
        for row in table.batch[: size.num_seqs].tolist():
            drafts = table.drafts.tokens[row, : size.num_queries - 1].tolist()
            key = int(table.seeds[row]), int(table.lengths[row]) + 1
            noted[key] = [*itertools.takewhile(NO_DRAFT.__ne__, drafts)]

    guesser.guess = noting  # type: ignore[method-assign]
    return noted


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize("name", REGIMES)
def test_drafts_are_what_the_draft_model_generates(
    name: str, toggles: bool, model_dir: Path, near_dir: Path
) -> None:
    """After right drafts and wrong ones."""
    params = endless(len(PROMPTS))
    with make(model_dir, near_dir, **REGIMES[name]) as llm:
        drafting = drafting_of(llm)
        if toggles:
            drafting.costs = AnyNumber(len(name))
        noted = note_drafts(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        audit_at_rest(llm)
        assert 0.2 < sum(drafting.accepted_at) / drafting.num_drafted < 0.9
    asked = [
        (prompt + output.token_ids[:number], param, noted[param.seed, len(prompt) + number])
        for prompt, param, output in zip(PROMPTS, params, outputs, strict=True)
        for number in range(16)
        if noted.get((param.seed or 0, len(prompt) + number))
    ]
    assert len(asked) > 30
    with make_llm(near_dir) as plain:
        some = [
            SamplingParams(
                temperature=param.temperature, seed=param.seed, max_tokens=len(drafts),
                ignore_eos=True,
            )
            for _, param, drafts in asked
        ]  # fmt: skip
        expected = plain.generate([text for text, *_ in asked], some, use_tqdm=False)
    assert [drafts for *_, drafts in asked] == [output.token_ids for output in expected]


def test_a_text_is_computed_once(model_dir: Path) -> None:
    """The prompt before the first drafts, and later what steps without drafts have added."""
    with make(model_dir, model_dir) as llm:
        counts, drafting = count_catch_ups(llm), drafting_of(llm)
        params = endless(1, max_tokens=31)
        llm.generate([[1, 2, 3, 4, 5, 6, 7]], params, use_tqdm=False)
        assert (counts, drafting.num_drafts) == ([7], 6)
        numbers = iter([NUM_DRAFTS, 0, 0, 0, NUM_DRAFTS, NUM_DRAFTS])
        drafting.costs.worthwhile = lambda *_, **__: iter([next(numbers, 0)])  # type: ignore
        counts.clear()
        llm.generate([[9, 8, 7]], params, use_tqdm=False)
        lost = NUM_DRAFTS + 1  # that the host is not sure of
        assert counts == [3, 3 + lost]


def test_a_prompt_is_computed_in_chunks(model_dir: Path) -> None:
    with make(model_dir, model_dir, max_num_batched_tokens=16) as llm:
        counts = count_catch_ups(llm)
        prompts = [[i] * 3 + list(range(20)) for i in range(3)]
        llm.generate(prompts, endless(3), use_tqdm=False)
        assert max(counts) == 16 and sum(counts) == 3 * 23
        assert sum(drafting_of(llm).accepted_at) == drafting_of(llm).num_drafted > 20


def test_samples_of_a_prompt_share_what_is_computed_of_it(model_dir: Path) -> None:
    """So does a later request with the same prompt, up to the last block."""
    prompt = random.Random(1).choices(range(200), k=165)
    params, again = (
        SamplingParams(temperature=1.0, seed=seed, max_tokens=3, n=n, ignore_eos=True)
        for seed, n in ((1, 3), (2, 1))
    )
    with make(model_dir, model_dir, kvcache_block_size=16) as llm:
        counts = count_catch_ups(llm)
        llm.generate([prompt], params, use_tqdm=False)
        assert counts == [165 + 2 * 5]
        llm.generate([prompt], again, use_tqdm=False)
        assert counts == [165 + 2 * 5, 5]
        assert sum(drafting_of(llm).accepted_at) == 4


def test_a_fork_leaves_what_the_draft_model_has_computed(model_dir: Path) -> None:
    """The block that it copies to holds other tokens, which a later request has again."""
    prompt, sampled = random.Random(1).choices(range(200), k=40), endless(2)[1]
    short, forked = SamplingParams(max_tokens=1), SamplingParams(n=2, max_tokens=1)
    options: dict[str, Any] = dict(kvcache_block_size=16, enable_prefix_caching=False)
    with make(model_dir, model_dir, **options) as llm:
        counts = count_catch_ups(llm)
        llm.generate([prompt], sampled, use_tqdm=False)
        llm.generate([[1, 2, 3]], forked, use_tqdm=False)
        llm.generate([[4], [5]], short, use_tqdm=False)  # the free blocks are in order again
        llm.generate([prompt], sampled, use_tqdm=False)
        assert counts == [40, 40 - 2 * 16]
        assert sum(drafting_of(llm).accepted_at) == drafting_of(llm).num_drafted > 20


def test_preempted_sequences_keep_what_their_blocks_hold(standard: Case) -> None:
    """Each prompt is computed once if its blocks were still cached."""
    with make(standard.path, standard.path, kvcache_block_size=4, num_kvcache_blocks=80) as llm:
        counts = count_catch_ups(llm)
        assert_same(generate(llm, standard), standard.expected)
        assert llm.scheduler.num_preemptions > 3
        assert sum(counts) < 1.3 * sum(map(len, standard.prompts))


@pytest.mark.sampled(share=0.3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, HARD])
def test_drafts_keep_the_output_of_models_with(
    name: str, options: dict[str, Any], tmp_path: Path, small_dir: Path
) -> None:
    """By the model itself, and by one that attends to all: then no blocks are freed early."""
    case = make_case(make_model(tmp_path, seed=1, **MODELS[name]), make_some_prompts())
    # Without the tokens before its window, of which no blocks are left, a model guesses worse.
    share = 0.4 if name == "a window" and options else 0.9
    for draft, least in ((case.path, share), (small_dir, 0.0)):
        with make(case.path, draft, **options) as llm:
            assert_same(generate(llm, case), case.expected)
            drafting = drafting_of(llm)
            assert sum(drafting.accepted_at) >= least * drafting.num_drafted > 0 or not least
            audit_at_rest(llm)
            has_window = name == "a window" and draft == case.path
            assert (llm.scheduler.layout.windows[0] is not None) == has_window


@pytest.mark.parametrize("name", ["a window", "experts"])
def test_other_models_draft_too(name: str, standard: Case, tmp_path: Path) -> None:
    with make(standard.path, make_model(tmp_path, seed=1, **MODELS[name])) as llm:
        assert_same(generate(llm, standard), standard.expected)
        assert llm.scheduler.layout.windows == (None,)


def test_drafts_with_an_fp8_cache(standard: Case) -> None:
    """Equal except for codes that rounding decides: see test_fp8_kv.py."""
    with make_llm(standard.path, kv_cache_dtype="fp8") as plain:
        expected = [output.token_ids for output in generate(plain, standard)]
    with make(standard.path, standard.path, kv_cache_dtype="fp8") as llm:
        got = [output.token_ids for output in generate(llm, standard)]
        same = sum(one == other for one, other in zip(got, expected, strict=True))
        drafting = drafting_of(llm)
        assert same >= 0.9 * len(expected)
        assert sum(drafting.accepted_at) > 0.9 * drafting.num_drafted


def test_an_error_keeps_the_output(standard: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model starts over, too."""
    prompts, params = standard.prompts[:12], endless(12, max_tokens=24)
    with make_llm(standard.path, **SMALL_POOL) as plain:
        expected = [one.token_ids for one in plain.generate(prompts, params, use_tqdm=False)]
    with make(standard.path, standard.path, **SMALL_POOL) as llm:
        shard, calls = llm.model_runner.shard, itertools.count(1)
        catch_up = shard.catch_up

        def failing(inputs: StepInputs) -> None:
            if next(calls) % 3 == 1:
                raise InterruptedError
            catch_up(inputs)

        monkeypatch.setattr(shard, "catch_up", failing)
        ids = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
        outputs, errors = {}, 0
        while not llm.is_finished():
            try:
                for output in llm.step():
                    outputs[output.request_id] = output
            except InterruptedError:
                errors += 1
            audit_scheduler(llm.scheduler)
        assert errors > 2
        assert_same([outputs[i] for i in ids], expected)
        drafting = drafting_of(llm)
        assert sum(drafting.accepted_at) == drafting.num_drafted > 100
        audit_at_rest(llm)


def test_aborts_leave_the_others_alone(standard: Case) -> None:
    with make(standard.path, standard.path, max_num_seqs=4, overlap=True) as llm:
        pairs = zip(standard.prompts, standard.params, strict=True)
        ids = [llm.add_request(prompt, params) for prompt, params in pairs]
        outputs, step = {}, 0
        victims = ids[::4]
        while not llm.is_finished():
            step += 1
            if step % 3 == 0 and victims and (victim := victims.pop()) in llm.requests.unfinished:
                llm.abort_request(victim)
            for output in llm.step():
                outputs[output.request_id] = output
            audit_scheduler(llm.scheduler)
        kept = [i for i in ids if i in outputs]
        assert 10 < len(kept) < len(ids)
        assert_same([outputs[i] for i in kept], [standard.expected[ids.index(i)] for i in kept])
        audit_at_rest(llm)


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model with ids that are no tokens."""
    return make_model(tmp_path / "padded", vocab_size=288)


def test_a_draft_model_may_be_padded_more(model_dir: Path, padded: Path) -> None:
    """It draws only tokens of the model."""
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=60, ignore_eos=True)
    with make_llm(model_dir) as plain:
        expected = plain.generate(PROMPTS[:8], params, use_tqdm=False)
    with make(model_dir, padded) as llm:
        assert all_samples(llm.generate(PROMPTS[:8], params, use_tqdm=False)) == all_samples(
            expected
        )
        assert drafting_of(llm).num_drafted > 100


def test_ids_that_the_draft_model_lacks_keep_the_output(model_dir: Path, padded: Path) -> None:
    """It reads another token in their place."""
    prompts = [[1, 270, 3], [280, 287], [1, 2]]
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True, **more)
        for i, more in enumerate(
            [{}, dict(allowed_token_ids=[1, 280]), dict(logit_bias={260: 9, 270: 9})]
        )
    ]
    with make_llm(padded) as plain:
        expected = plain.generate(prompts, params, use_tqdm=False)
    with make(padded, model_dir) as llm:
        assert all_samples(llm.generate(prompts, params, use_tqdm=False)) == all_samples(expected)
        assert drafting_of(llm).num_drafted > 50


@pytest.mark.parametrize("graphs", [False, True])
def test_sequences_that_are_too_long_for_the_draft_model_get_no_drafts(
    graphs: bool, model_dir: Path
) -> None:
    """Beside others they may have some, of no worth, which take no harm."""
    params, prompts = endless(3, max_tokens=30, sampled=False), [[1, 2, 3], [7] * 30, [8, 9]]
    with make_llm(model_dir) as plain:
        expected = plain.generate(prompts, params, use_tqdm=False)
    with make(model_dir, model_dir, dict(max_model_len=20), kvcache_block_size=1) as llm:
        if graphs:
            use_graphs(llm)
        noted = note_drafts(llm)
        got = llm.generate([prompts[0]], params[0], use_tqdm=False)
        assert max(length + len(drafts) for (_, length), drafts in noted.items()) == 20
        llm.generate([prompts[1]], params[1], use_tqdm=False)
        assert max(length for _, length in noted) < 20
        got = llm.generate(prompts, params, use_tqdm=False)
        assert all_samples(got) == all_samples(expected)
        assert max(length for _, length in noted) > 20


def test_the_pools_share_the_memory(model_dir: Path, small_dir: Path) -> None:
    """`small_dir` has half the layers."""
    with make_llm(model_dir, cpu_kvcache_gib=0.03) as plain:
        num_blocks = plain.config.num_kvcache_blocks
    with make(model_dir, small_dir, cpu_kvcache_gib=0.03) as llm:
        assert llm.config.num_kvcache_blocks == num_blocks * 2 // 3
        model, draft = llm.model_runner.shard, guesser_of(llm)
        assert model.caches.kv.cache.shape[1] == draft.pool.cache.shape[1] == num_blocks * 2 // 3
        assert drafting_of(llm).costs._guess == pytest.approx(0.6, abs=0.05)  # type: ignore


def test_random_weights_need_no_tokenizers(model_dir: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", vocab_size=300)
    (tmp_path / "other" / "tokenizer.json").unlink()
    with make(model_dir, other, load_format="dummy") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert drafting_of(llm).num_drafted > 0


def change_tokenizer(path: Path) -> Path:
    file = path / "tokenizer.json"
    swapped = {"a": "b", "b": "a"}
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = {swapped.get(token, token): i for token, i in vocab.items()}
    file.write_text(json.dumps(raw))
    return path


def without_tokenizer(path: Path) -> Path:
    for file in path.glob("*token*"):
        file.unlink()
    return path


def test_a_draft_model_that_does_not_fit_is_an_error_that_names_it(
    model_dir: Path, tmp_path: Path
) -> None:
    def assert_refused(draft: Path, error: type[Exception], text: str, **options: Any) -> None:
        keys = options.pop("keys", None)
        with pytest.raises(error) as raised:
            make(model_dir, draft, keys, **options)
        assert str(raised.value).startswith(f"speculative_config, draft model '{draft}': ")
        assert text in str(raised.value)

    assert_refused(tmp_path / "none", FileNotFoundError, "does not exist")
    other = make_model(tmp_path / "other")
    assert_refused(
        change_tokenizer(other), ValueError,
        "must have the model's tokenizer, but token 64 is 'b', and the model's is 'a'",
    )  # fmt: skip
    padded = without_tokenizer(make_model(tmp_path / "padded", vocab_size=288))
    assert_refused(padded, ValueError, "vocab_size must be the model's, 259, where a tokenizer")
    odd = make_model(tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3)
    text = "tensor_parallel_size=2 cannot split num_attention_heads=3"
    assert_refused(odd, ValueError, text, tensor_parallel_size=2)
    assert_refused(
        model_dir, ValueError, "max_model_len must be at most 512", keys=dict(max_model_len=600)
    )
    edit_config(other, hidden_size=1 << 24, vocab_size=1 << 17)
    assert_refused(other, MemoryError, "no memory on cpu for a model with", load_format="dummy")


def test_a_pool_without_room_for_both_models_is_an_error(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"leaves .* MiB for the KV cache, one block takes"):
        make(model_dir, model_dir, cpu_kvcache_gib=0.00001)


def test_guesses_add_to_what_drafts_cost() -> None:
    """In steps of the model, where each token takes the same time."""
    candidates = [Candidate(Pace(), 10, 4)] * 3
    for costs, number in ((TokenCosts(), 4), (TokenCosts(guess=0.3), 2), (TokenCosts(1.0), 0)):
        assert next(iter(costs.worthwhile(candidates, 3, waits=True))) == number


def ends_of(outputs: list[RequestOutput]) -> list[Any]:
    """Of each sample, what rounding does not change."""
    return [[(one.token_ids, one.finish_reason) for one in o.outputs] for o in outputs]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), HARD, dict(HARD, scheduling="mixed"), dict(max_num_seqs=3),
     dict(tensor_parallel_size=2)],
)  # fmt: skip
def test_a_gpu_keeps_every_output(options: dict[str, Any], model_dir: Path, near_dir: Path) -> None:
    """Guesses are a part of the decode graphs."""
    need_gpus(options.get("tensor_parallel_size", 1))
    gpu: dict[str, Any] = options | dict(
        device="cuda", gpu_memory_utilization=0.05, kvcache_block_size=16
    )
    params = sampled_params()
    with make_llm(model_dir, **gpu) as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    for draft in (model_dir, near_dir):
        with make(model_dir, draft, **gpu) as llm:
            drafting = drafting_of(llm)
            natural = llm.generate(PROMPTS, params, use_tqdm=False)
            assert ends_of(natural) == ends_of(expected)
            drafting.costs = TokenCosts()  # what is measured would not pay
            got = llm.generate(PROMPTS, params, use_tqdm=False)
            assert ends_of(got) == ends_of(expected)
            if draft == model_dir:
                assert sum(drafting.accepted_at) > 0.4 * drafting.num_drafted
            assert sum(drafting.accepted_at) > 20
            audit_at_rest(llm)


def test_a_draft_model_as_large_as_the_model_is_warned_of(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(model_dir, speculative_config={"model": str(model_dir)}):
        assert "a step of the draft model reads 100% of the bytes" in caplog.text
