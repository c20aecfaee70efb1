"""Log-probabilities equal those of transformers' logits, with any scheduling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import (
    HARD,
    Case,
    assert_same,
    load_reference,
    make_case,
    make_llm,
    make_prompts,
)

from nanovllm import SamplingParams
from nanovllm.engine.schedule.sequence import Sequence

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

MAX_ERROR = 1e-4


@pytest.fixture(scope="module")
def case(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, dict(max_num_batched_tokens=7), HARD, dict(tensor_parallel_size=2)]
)
def test_logprobs_equal_transformers(options: dict[str, Any], case: Case) -> None:
    """Twice, the second time from the prefix cache; the requests ask for 0 to 4 logprobs."""
    params = [
        SamplingParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, logprobs=i % 5)
        for i, p in enumerate(case.params)
    ]
    expected = case.logits.log_softmax(-1)
    with make_llm(case.path, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(case.prompts, params, use_tqdm=False)
            assert_same(outputs, case.expected)
            for index, out in enumerate(outputs):
                entries = out["logprobs"]
                assert entries is not None and len(entries) == len(out["token_ids"])
                for row, likely in enumerate(entries):
                    best = expected[index, row].topk(max(1, index % 5)).indices.tolist()
                    assert [entry["token_id"] for entry in likely] == best  # greedy is the first
                    assert [entry["rank"] for entry in likely] == [*range(1, len(best) + 1)]
                    for entry in likely:
                        error = entry["logprob"] - float(expected[index, row, entry["token_id"]])
                        assert abs(error) < MAX_ERROR
                        assert entry["text"] == llm.tokenizer.decode([entry["token_id"]])
                total = sum(likely[0]["logprob"] for likely in entries)
                assert out["cumulative_logprob"] == pytest.approx(total)


def test_a_drawn_token_comes_first_with_its_rank(case: Case) -> None:
    """Its rank and logprob are those of the raw logits, before any filter."""
    with make_llm(case.path) as llm:
        hot = SamplingParams(
            temperature=3.0, seed=1, max_tokens=1, logprobs=3, logit_bias={7: 5.0}, top_k=100
        )
        outputs = llm.generate(case.prompts, hot, use_tqdm=False)
    ranks = []
    for index, out in enumerate(outputs):
        (likely,) = out["logprobs"] or []
        row = case.logits[index, 0].log_softmax(-1)
        (token_id,) = out["token_ids"]
        assert likely[0]["token_id"] == token_id
        assert likely[0]["rank"] == int((row > row[token_id]).sum()) + 1
        assert likely[0]["logprob"] == pytest.approx(float(row[token_id]), abs=MAX_ERROR)
        others = [entry["token_id"] for entry in likely[1:]]
        assert others == [i for i in row.topk(3).indices.tolist() if i != token_id]
        ranks.append(likely[0]["rank"])
    assert max(ranks) > 20, "no unlikely token was drawn"


def test_only_requests_that_ask_have_logprobs(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        plain, asking = (
            llm.generate([1, 2], SamplingParams(max_tokens=2, logprobs=n), use_tqdm=False)[0]
            for n in (None, 0)
        )
        assert plain["logprobs"] is plain["cumulative_logprob"] is None
        assert [len(likely) for likely in asking["logprobs"] or []] == [1, 1]
        with pytest.raises(ValueError, match=r"logprobs must be in \[0, 259\], got 260"):
            llm.generate([1], SamplingParams(logprobs=260))


def test_only_the_first_sample_reports_a_prompt_and_only_if_asked(model_dir: Path) -> None:
    """The logits of a prompt's tokens take time."""
    asked: list[dict[str, int]] = [dict(logprobs=0), dict(prompt_logprobs=0, n=2)]
    with make_llm(model_dir) as llm:
        params = [SamplingParams(max_tokens=2, **fields) for fields in asked]  # type: ignore[arg-type]
        requests = [llm.requests.unfinished[llm.add_request([1, 2, 3], one)] for one in params]
        while not llm.is_finished():
            llm.step()
    reported = [[len(seq.parts.logprobs.prompt) for seq in one.seqs] for one in requests]
    assert reported == [[0], [2, 0]]


@pytest.mark.parametrize("appended", [False, True])
def test_the_logprobs_of_a_token_that_is_taken_back_are_replaced(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, appended: bool
) -> None:
    """An interrupt strikes before or after the last token is appended; it is drawn again."""
    params = SamplingParams(max_tokens=3, seed=1, logprobs=1, ignore_eos=True)
    with make_llm(model_dir, overlap=False) as llm:
        (expected,) = llm.generate([1, 2], params, use_tqdm=False)
        request = llm.requests.unfinished[llm.add_request([1, 2], params)]
        llm.step()
        llm.step()
        logprobs = request.seqs[0].parts.logprobs

        def interrupted(*_: Any) -> Any:
            assert logprobs._generated[4], "the last token's entry has arrived"
            logprobs._generated[4] = [(0, -99.0, 1)]
            raise KeyboardInterrupt

        place = (Sequence, "finish") if appended else (llm.scheduler, "postprocess")
        with monkeypatch.context() as patch:
            patch.setattr(*place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        assert request.seqs[0].num_tokens == 4
        while not (outputs := llm.step()):
            pass
        assert outputs[0]["logprobs"] == expected["logprobs"]


def test_equal_logits_have_equal_ranks(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        compute = llm.model_runner.shard.model.compute_logits

        def alike(hidden: torch.Tensor, *out: Any) -> torch.Tensor:
            logits: torch.Tensor = torch.zeros_like(compute(hidden, *out))
            logits[:, [3, 5]] = 1.0
            return logits

        llm.model_runner.shard.model.compute_logits = alike  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=4)
        (likely,) = llm.generate([1], params, use_tqdm=False)[0]["logprobs"] or []
    assert [(entry["token_id"], entry["rank"]) for entry in likely] == [
        (3, 1),
        (5, 1),
        (0, 3),
        (1, 3),
    ]


def test_logprobs_without_a_tokenizer_have_no_text(case: Case) -> None:
    with make_llm(case.path) as llm:
        llm.tokenizer = None
        (out,) = llm.generate([1], SamplingParams(max_tokens=1, logprobs=2), use_tqdm=False)
        (likely,) = out["logprobs"] or []
        assert len(likely) >= 2 and {entry["text"] for entry in likely} == {""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_num_batched_tokens=7), HARD, dict(tensor_parallel_size=2)],
    ids=repr,
)
def test_prompt_logprobs_equal_transformers(options: dict[str, Any], case: Case) -> None:
    """Twice, the second time with all prompts in the prefix cache, among other requests."""
    prompts = [prompt for prompt in case.prompts if len(prompt) < 130]
    logits = prompt_logits(case.path, prompts)
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, n=1 + i % 2,
            prompt_logprobs=i % 4 if i % 3 else None,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    with make_llm(case.path, **options) as llm:
        for _ in range(2):
            for index, out in enumerate(llm.generate(prompts, params, use_tqdm=False)):
                number, likely = params[index].prompt_logprobs, out["prompt_logprobs"]
                if number is None:
                    assert likely is None
                    continue
                assert (
                    likely is not None and len(likely) == len(prompts[index]) and likely[0] is None
                )
                for row, entries in enumerate(likely[1:]):
                    expected = logits[index][row].log_softmax(-1)
                    token_id = prompts[index][row + 1]
                    assert entries is not None and entries[0]["token_id"] == token_id
                    assert entries[0]["rank"] == int((expected > expected[token_id]).sum()) + 1
                    best = expected.topk(number).indices.tolist() if number else []
                    others = [entry["token_id"] for entry in entries[1:]]
                    assert others == [i for i in best if i != token_id]
                    for entry in entries:
                        assert (
                            abs(entry["logprob"] - float(expected[entry["token_id"]])) < MAX_ERROR
                        )
        if options is HARD:
            assert llm.scheduler.num_preemptions > 0


@torch.inference_mode()
def prompt_logits(path: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = load_reference(path)
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def test_prompt_logprobs_are_computed_a_few_rows_at_a_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of 16,384 tokens of a large vocabulary would take 10 GB."""
    monkeypatch.setattr("nanovllm.engine.run.logprobs.MAX_LOGITS", 259 * 3)
    with make_llm(case.path) as llm:
        sizes, compute = [], llm.model_runner.shard.model.compute_logits

        def recorded(hidden: torch.Tensor, *out: Any) -> torch.Tensor:
            sizes.append(len(hidden))
            return compute(hidden, *out)

        llm.model_runner.shard.model.compute_logits = recorded  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate([[1, 2, 3, 4, 5, 6], [7, 8, 9]], params, use_tqdm=False)
    assert sizes == [3, 3, 1, 2]


def test_prompts_with_logprobs_do_not_wait_for_each_other(case: Case) -> None:
    """They cannot use each other's blocks, so equal prompts are computed side by side."""
    with make_llm(case.path, kvcache_block_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        first, second = llm.generate([[1] * 20] * 2, params, use_tqdm=False)
        assert llm.stats()["prefill_tokens"] == 40
        assert first["prompt_logprobs"] == second["prompt_logprobs"]
        with pytest.raises(ValueError, match=r"prompt_logprobs must be in \[0, 259\], got 260"):
            llm.generate([1], SamplingParams(prompt_logprobs=260))
