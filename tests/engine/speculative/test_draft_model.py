"""A draft model: output stays the same, its drafts are what it would generate, nothing is twice."""

import functools
import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from drafts import make_eager, speculator_of
from reference import (
    HARD,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    generate,
    make_case,
    make_llm,
    make_prompts,
)
from safetensors.torch import load_file, save_file
from test_exact_drafts import (
    MODELS,
    PROMPTS,
    READERS,
    REGIMES,
    ROWS,
    all_samples,
    sampled_params,
)

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import Batch
from nanovllm.engine.requests.token_counts import TokenCounts
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.engine.speculative.costs import Candidate, GraphCosts, TokenCosts
from nanovllm.engine.speculative.draft_model import DraftModelProposer, Shadow
from nanovllm.engine.speculative.pace import Pace
from nanovllm.engine.step.device_table import BUFFERS
from nanovllm.engine.step_size import Size
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


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
    """An engine in which all sequences get as many drafts as fit."""
    config = {"model": str(draft), "num_speculative_tokens": NUM_DRAFTS, **(keys or {})}
    return make_eager(path, config, **options)


def proposer_of(llm: LLM) -> DraftModelProposer:
    proposer = speculator_of(llm).proposer
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def repeat_steps(llm: LLM) -> None:
    """Let the draft model compute a few missing tokens by decode steps, as where it has graphs."""
    shard = llm.model_runner.shards[1]
    shard.graphs = shard.decode_graphs(8)
    proposer_of(llm)._repeats_steps = True


@dataclass
class Steps:
    """What the draft model computes: the tokens of each prefill and each decode step."""

    prefills: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.prefills) + sum(self.decodes)


def count_steps(llm: LLM) -> Steps:
    steps, runner = Steps(), proposer_of(llm)._runner
    launch = runner.launch

    def counting(batch: Batch) -> Any:
        kind = steps.prefills if batch.is_prefill else steps.decodes
        kind.append(sum(seq.num_scheduled_tokens for seq in batch.seqs))
        return launch(batch)

    runner.launch = counting  # type: ignore[method-assign]
    return steps


@dataclass
class Proposals:
    """The drafts of each proposal, with the tokens before them and the sequence's parameters."""

    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


def note_proposals(llm: LLM) -> Proposals:
    noted, proposer = Proposals(), proposer_of(llm)
    propose = proposer.propose

    def noting(seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        proposed = propose(seqs, most)
        for seq, drafts in zip(seqs, proposed, strict=True):
            if drafts:
                noted.prompts.append(list(seq.token_ids))
                noted.drafts.append(drafts)
                some = dict(temperature=seq.temperature, seed=seq.seed, max_tokens=len(drafts))
                noted.params.append(SamplingParams(**some, ignore_eos=True))  # type: ignore[arg-type]
        return proposed

    proposer.propose = noting  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize("name", REGIMES)
def test_drafts_of_the_model_itself_are_all_right(name: str, standard: Case) -> None:
    with make(standard.path, standard.path, **REGIMES[name]) as llm:
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)
        speculator = speculator_of(llm)
        assert sum(speculator.accepted_at) == speculator.num_drafted > 60
        assert_same(generate(llm, standard), standard.expected)  # from the cache
        assert sum(speculator.accepted_at) == speculator.num_drafted > 120


@pytest.mark.parametrize("options", [{}, HARD, dict(HARD, scheduling="mixed", overlap=True)])
def test_wrong_drafts_keep_the_output(
    options: dict[str, Any], standard: Case, near_dir: Path
) -> None:
    with make(standard.path, near_dir, **options) as llm:
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)
        speculator = speculator_of(llm)
        rate = sum(speculator.accepted_at) / speculator.num_drafted
        assert 0.1 < rate < 0.9 and min(speculator.accepted_at) > 5


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
        speculator = speculator_of(llm)
        if is_own:
            assert sum(speculator.accepted_at) > 0.9 * speculator.num_drafted
        assert sum(speculator.accepted_at) > 50
        audit_at_rest(llm)


def test_the_draft_models_runner_does_not_end_the_ranks(model_dir: Path) -> None:
    """The model's runner owns all shards, and the workers."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with make(model_dir, model_dir, tensor_parallel_size=2) as llm:
        (expected,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        proposer_of(llm)._runner.close()  # type: ignore[attr-defined]
        (got,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert got.token_ids == expected.token_ids
        assert llm.model_runner.failure is None


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("options", [{}, dict(HARD, overlap=True), dict(SMALL_POOL, **ROWS)])
def test_penalties_and_bad_words_keep_every_output(
    options: dict[str, Any], is_own: bool, model_dir: Path, near_dir: Path
) -> None:
    """The large model's draws count all drafts, the draft model's those that are not in flight."""
    params = sampled_params(READERS)
    with make_llm(model_dir, **options) as plain:
        plain.scheduler.speculator = None
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    with make(model_dir, model_dir if is_own else near_dir, **options) as llm:
        assert all_samples(llm.generate(PROMPTS, params, use_tqdm=False)) == all_samples(expected)
        speculator = speculator_of(llm)
        assert 100 < sum(speculator.accepted_at) < 0.9 * speculator.num_drafted
        audit_at_rest(llm)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kvcache_block_size=4),
        SMALL_POOL,
        dict(HARD, scheduling="mixed"),
        dict(HARD, **ROWS),
    ],
)
def test_drafts_are_what_the_draft_model_generates(
    options: dict[str, Any], repeats: bool, model_dir: Path, near_dir: Path
) -> None:
    """After right drafts and wrong ones, whatever became of the blocks."""
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=16, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with make(model_dir, near_dir, **options) as llm:
        if repeats:
            repeat_steps(llm)
        noted = note_proposals(llm)
        llm.generate(PROMPTS, params, use_tqdm=False)
        audit_at_rest(llm)
        speculator = speculator_of(llm)
        assert 0.2 < sum(speculator.accepted_at) / speculator.num_drafted < 0.9
    with make_llm(near_dir) as plain:
        expected = plain.generate(noted.prompts, noted.params, use_tqdm=False)
        assert noted.drafts == [output.token_ids for output in expected]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_proposal_takes_as_many_steps_as_drafts(repeats: bool, model_dir: Path) -> None:
    """Prompts are computed once. A draft that was right and the last is computed the next time."""
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    with make(model_dir, model_dir) as llm:
        if repeats:
            repeat_steps(llm)
        steps = count_steps(llm)
        llm.generate([[1, 2, 3, 4, 5, 6, 7]], params, use_tqdm=False)
        assert speculator_of(llm).num_drafts == 6
        if repeats:
            assert steps.prefills == [8]
            assert steps.decodes == [1] * (3 + 5 * (NUM_DRAFTS + 1))
        else:
            assert steps.prefills == [8] + [2] * 5
            assert steps.decodes == [1] * 6 * (NUM_DRAFTS - 1)


@pytest.mark.parametrize("repeats", [False, True])
def test_drafts_leave_the_counts_of_tokens_alone(
    repeats: bool, model_dir: Path, near_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is counted once, in spite of wrong drafts."""
    counted, place_of = [0], TokenCounts._place_of

    def counting(self: TokenCounts, token_id: int) -> int:
        counted[0] += 1
        return place_of(self, token_id)

    monkeypatch.setattr(TokenCounts, "_place_of", counting)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=0.5)
    with make(model_dir, near_dir) as llm:
        if repeats:
            repeat_steps(llm)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        accepted = sum(speculator_of(llm).accepted_at)
        assert 0 < accepted < speculator_of(llm).num_drafted
        assert counted[0] <= 3 + 30


def test_penalties_of_a_draft_count_the_drafts_before_it() -> None:
    """Those that are known; the text is not kept for drafts."""
    counts = TokenCounts()
    seq = Sequence([7, 8], SamplingParams(presence_penalty=1), counts=counts, text=counts)
    shadow = Shadow(seq)
    for known, drafts, expected in (
        ([], [7, 9], {7: 1, 8: 0, 9: 1}),
        ([9], [9, PENDING], {7: 0, 8: 0, 9: 2}),
        ([8], [5], {7: 0, 8: 1, 9: 1, 5: 1}),
    ):
        seq.token_ids += known
        seq.follow()
        shadow.follow(seq)
        shadow.seq.token_ids += drafts
        shadow.seq.num_pending_tokens = drafts.count(PENDING)
        shadow.seq.counts.update(shadow.seq)
        assert dict(zip(*shadow.seq.counts.after([]), strict=True)) == expected
        shadow.seq.num_pending_tokens = 0
    assert dict(zip(*counts.after([]), strict=True)) == {7: 0, 8: 1, 9: 1}
    assert shadow.seq.text is None and not shadow.seq.followers


@pytest.mark.parametrize("repeats", [False, True])
def test_no_more_steps_are_in_flight_than_the_device_table_has_buffers(
    repeats: bool, model_dir: Path, near_dir: Path
) -> None:
    """A step's changes of the table may be read from the host's memory when it runs."""
    with make(model_dir, near_dir, dict(num_speculative_tokens=9)) as llm:
        if repeats:
            repeat_steps(llm)
        runner, numbers = proposer_of(llm)._runner, [0]
        launch, wait = runner.launch, runner.wait

        def counting_launch(batch: Batch) -> Any:
            numbers.append(numbers[-1] + 1)
            return launch(batch)

        def counting_wait(launched: Any) -> list[int]:
            numbers.append(numbers[-1] - 1)
            return wait(launched)

        runner.launch, runner.wait = counting_launch, counting_wait  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
        assert max(numbers) == BUFFERS - 1 and numbers[-1] == 0


def test_no_token_is_computed_twice_except_wrong_drafts(model_dir: Path, near_dir: Path) -> None:
    """Blocks that only wrong drafts had are freed, and the table becomes a new list."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[i, 2, 3] * (i + 1) for i in range(6)]
    with make(model_dir, near_dir, kvcache_block_size=2) as llm:
        steps = count_steps(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        speculator = speculator_of(llm)
        num_wrong = speculator.num_drafted - sum(speculator.accepted_at)
        num_tokens = sum(len(o.prompt_token_ids) + len(o.token_ids) for o in outputs)
        assert num_wrong > 100 and steps.num_tokens <= num_tokens + num_wrong


def test_samples_of_a_prompt_share_what_is_computed_of_it(model_dir: Path) -> None:
    """So does a later request with the same prompt, up to the last block."""
    prompt = random.Random(1).choices(range(200), k=165)
    params, again = (
        SamplingParams(temperature=1.0, seed=seed, max_tokens=3, n=n, ignore_eos=True)
        for seed, n in ((1, 3), (2, 1))
    )
    with make(model_dir, model_dir, kvcache_block_size=16) as llm:
        steps = count_steps(llm)
        llm.generate([prompt], params, use_tqdm=False)
        assert steps.prefills == [166 + 2 * 6]
        llm.generate([prompt], again, use_tqdm=False)
        assert steps.prefills == [166 + 2 * 6, 6]
        assert sum(speculator_of(llm).accepted_at) == 4


def test_preempted_sequences_keep_what_their_blocks_hold(standard: Case) -> None:
    """Each prompt is computed once if its blocks were still cached."""
    with make(standard.path, standard.path, kvcache_block_size=4, num_kvcache_blocks=80) as llm:
        steps = count_steps(llm)
        assert_same(generate(llm, standard), standard.expected)
        assert llm.scheduler.num_preemptions > 3
        total = sum(map(len, standard.prompts)) + sum(map(len, standard.expected))
        assert steps.num_tokens < 1.1 * total


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, HARD])
def test_drafts_keep_the_output_of_models_with(
    name: str, options: dict[str, Any], tmp_path: Path, small_dir: Path
) -> None:
    """By the model itself, and by one that attends to all: then no blocks are freed early."""
    case = make_case(make_model(tmp_path, seed=1, **MODELS[name]), make_prompts())
    # Without the tokens before its window, of which no blocks are left, a model guesses worse.
    share = 0.4 if name == "a window" and options else 0.9
    for draft, least in ((case.path, share), (small_dir, 0.0)):
        with make(case.path, draft, **options) as llm:
            assert_same(generate(llm, case), case.expected)
            speculator = speculator_of(llm)
            assert sum(speculator.accepted_at) >= least * speculator.num_drafted > 0 or not least
            audit_at_rest(llm)
            has_window = name == "a window" and draft == case.path
            assert (llm.scheduler.window is not None) == has_window


@pytest.mark.parametrize("name", ["a window", "experts"])
def test_other_models_draft_too(name: str, standard: Case, tmp_path: Path) -> None:
    with make(standard.path, make_model(tmp_path, seed=1, **MODELS[name])) as llm:
        assert_same(generate(llm, standard), standard.expected)
        assert llm.scheduler.window is None


def test_drafts_with_an_fp8_cache(standard: Case) -> None:
    """Equal except for codes that rounding decides: see test_fp8_kv.py."""
    with make_llm(standard.path, kv_cache_dtype="fp8") as plain:
        expected = [output.token_ids for output in generate(plain, standard)]
    with make(standard.path, standard.path, kv_cache_dtype="fp8") as llm:
        got = [output.token_ids for output in generate(llm, standard)]
        same = sum(one == other for one, other in zip(got, expected, strict=True))
        speculator = speculator_of(llm)
        assert same >= 0.9 * len(expected)
        assert sum(speculator.accepted_at) > 0.9 * speculator.num_drafted


def test_an_error_in_a_proposal_keeps_the_output(
    standard: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model starts over, too: with the seeds and temperatures of all sequences."""
    prompts = standard.prompts[:12]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(12)
    ]
    with make_llm(standard.path, **SMALL_POOL) as plain:
        expected = [one.token_ids for one in plain.generate(prompts, params, use_tqdm=False)]
    with make(standard.path, standard.path, **SMALL_POOL) as llm:
        runner: Any = proposer_of(llm)._runner
        calls = 0

        def failing(method: Any, argument: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2 or calls % 17 == 0:  # the first step is the rows' first, too
                raise InterruptedError
            return method(argument)

        for owner, name in ((runner, "launch"), (runner.shard, "compute"), (runner, "wait")):
            monkeypatch.setattr(owner, name, functools.partial(failing, getattr(owner, name)))
        pairs = zip(prompts, params, strict=True)
        ids = [llm.add_request(prompt, some) for prompt, some in pairs]
        outputs, errors = {}, 0
        while not llm.is_finished():
            try:
                for output in llm.step():
                    outputs[output.request_id] = output
            except InterruptedError:
                errors += 1
            llm.scheduler.audit()
        assert errors > 3
        assert_same([outputs[i] for i in ids], expected)
        speculator = speculator_of(llm)
        assert sum(speculator.accepted_at) == speculator.num_drafted > 100
        audit_at_rest(llm)


def test_nothing_of_a_draft_is_reported(model_dir: Path) -> None:
    with make(model_dir, model_dir) as llm:
        runner: Any = proposer_of(llm)._runner
        launch, reports = runner.launch, []

        def noting(batch: Batch) -> Any:
            launched = launch(batch)
            reports.append(launched._reports)
            return launched

        runner.launch = noting
        params = SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1)
        (out,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert reports and not any(reports) and len(out.logprobs) == len(out.token_ids)


def test_aborts_leave_the_others_alone_and_free_their_rows(standard: Case) -> None:
    """Finished requests, which the caller keeps, have no row of the draft model's table."""
    with make(standard.path, standard.path, max_num_seqs=4) as llm:
        pairs = zip(standard.prompts, standard.params, strict=True)
        ids = [llm.add_request(prompt, params) for prompt, params in pairs]
        requests = dict(llm.unfinished)
        outputs, step = {}, 0
        victims = ids[::4]
        while not llm.is_finished():
            step += 1
            if step % 3 == 0 and victims and (victim := victims.pop()) in llm.unfinished:
                llm.abort_request(victim)
            for output in llm.step():
                outputs[output.request_id] = output
            llm.scheduler.audit()
            assert len(proposer_of(llm)._shadows) <= 2 * 4
        assert len(requests) == len(ids)
        kept = [i for i in ids if i in outputs]
        assert 10 < len(kept) < len(ids)
        assert_same([outputs[i] for i in kept], [standard.expected[ids.index(i)] for i in kept])
        audit_at_rest(llm)


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model with ids that are no tokens."""
    return make_model(tmp_path / "padded", vocab_size=288)


def test_a_draft_model_may_be_padded_more(model_dir: Path, padded: Path) -> None:
    """A draft that is no token of the model ends the drafts."""
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=60, ignore_eos=True)
    with make_llm(model_dir) as plain:
        expected = plain.generate(PROMPTS[:8], params, use_tqdm=False)
    with make(model_dir, padded) as llm:
        assert all_samples(llm.generate(PROMPTS[:8], params, use_tqdm=False)) == all_samples(
            expected
        )
        assert speculator_of(llm).num_drafted > 100


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([1, 270, 3], {}), ([1], dict(allowed_token_ids=[1, 280])),
        ([1], dict(logit_bias={260: 1})), ([1], dict(stop_token_ids=[287], min_tokens=5)),
        ([1], dict(bad_words=["a"])),
    ],
)  # fmt: skip
def test_sequences_with_ids_that_the_draft_model_lacks_get_no_drafts(
    prompt: list[int],
    params: dict[str, Any],
    model_dir: Path,
    padded: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make(padded, model_dir) as llm:
        # As the ids of a tokenizer that has more tokens than the draft model's.
        monkeypatch.setattr(llm._intake, "_bad_words", lambda p: ((270,),) if p.bad_words else ())
        some = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **params)
        llm.generate([prompt], some, use_tqdm=False)
        assert speculator_of(llm).num_drafted == 0
        outputs = llm.generate([[1, 2]], SamplingParams(max_tokens=20, seed=1), use_tqdm=False)
        assert speculator_of(llm).num_drafted > 0 and len(outputs[0].token_ids) == 20


def test_sequences_that_are_too_long_for_the_draft_model_get_no_drafts(model_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with make_llm(model_dir) as plain:
        expected = plain.generate([[1, 2, 3], [7] * 30], params, use_tqdm=False)
    options = dict(kvcache_block_size=1)
    with make(model_dir, model_dir, dict(max_model_len=20), **options) as llm:
        longest = 0
        propose = proposer_of(llm).propose

        def noting(seqs: list[Sequence], most: list[int]) -> list[list[int]]:
            nonlocal longest
            drafts = propose(seqs, most)
            ends = (seq.num_tokens + len(d) for seq, d in zip(seqs, drafts, strict=True) if d)
            longest = max(longest, *ends, 0)
            return drafts

        proposer_of(llm).propose = noting  # type: ignore[method-assign]
        got = llm.generate([[1, 2, 3], [7] * 30], params, use_tqdm=False)
        assert all_samples(got) == all_samples(expected)
        assert longest == 20


def test_the_pools_share_the_memory(model_dir: Path, small_dir: Path) -> None:
    """`small_dir` has half the layers."""
    with make_llm(model_dir, cpu_kvcache_gib=0.03) as plain:
        num_blocks = plain.config.num_kvcache_blocks
    with make(model_dir, small_dir, cpu_kvcache_gib=0.03) as llm:
        assert llm.config.num_kvcache_blocks == num_blocks * 2 // 3
        model, draft = llm.model_runner.shards
        assert model.pool.cache.shape[2] == draft.pool.cache.shape[2] == num_blocks * 2 // 3
        assert speculator_of(llm).costs._guess == pytest.approx(0.6, abs=0.05)  # type: ignore
    assert not hasattr(draft, "model") and not hasattr(draft, "pool")


def test_random_weights_need_no_tokenizers(model_dir: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", vocab_size=300)
    (tmp_path / "other" / "tokenizer.json").unlink()
    with make(model_dir, other, load_format="dummy") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert speculator_of(llm).num_drafted > 0


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
    """By steps of the model where each token takes the same time, by seconds with graphs."""
    seconds = {Size(n, queries): 1.0 + 0.1 * queries for n in (1, 4) for queries in (1, 2, 5)}
    candidates = [Candidate(Pace(), 10, 4)] * 3
    for costs, number in (
        (TokenCosts(), 4),
        (TokenCosts(guess=0.3), 2),
        (TokenCosts(guess=1.0), 0),
        (GraphCosts(seconds), 4),
        (GraphCosts(seconds, {Size(1): 0.1, Size(4): 0.2}), 4),
        (GraphCosts(seconds, {Size(1): 0.1, Size(4): 0.5}), 1),
        (GraphCosts(seconds, {Size(1): 0.1, Size(4): 1.0}), 0),
    ):
        assert next(iter(costs.worthwhile(candidates, 3, waits=True))) == number
    assert [*GraphCosts(seconds, {Size(4): 0.1}).worthwhile(candidates * 2, 6, waits=True)] == [
        0
    ] * 6


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
    """Draft steps are decode graphs, and so is what a few missing tokens take."""
    if options.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    gpu: dict[str, Any] = options | dict(
        device="cuda", gpu_memory_utilization=0.05, kvcache_block_size=16
    )
    params = sampled_params()
    with make_llm(model_dir, **gpu) as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
    for draft in (model_dir, near_dir):
        with make(model_dir, draft, **gpu) as llm:
            speculator = speculator_of(llm)
            natural = llm.generate(PROMPTS, params, use_tqdm=False)
            assert ends_of(natural) == ends_of(expected)
            speculator.costs = TokenCosts()  # what is measured would not pay
            got = llm.generate(PROMPTS, params, use_tqdm=False)
            assert ends_of(got) == ends_of(expected)
            if draft == model_dir:
                assert sum(speculator.accepted_at) > 0.9 * speculator.num_drafted
            assert sum(speculator.accepted_at) > 30
            audit_at_rest(llm)


def test_a_draft_model_as_large_as_the_model_is_warned_of(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm(model_dir, speculative_config={"model": str(model_dir)}):
        assert "a step of the draft model reads 100% of the bytes" in caplog.text
