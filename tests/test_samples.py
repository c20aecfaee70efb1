"""`n` samples of one prompt: computed once, shared, each drawn from a stream of its own."""

from pathlib import Path
from typing import Any

import pytest
from reference import HARD, SMALL_POOL, Case, audit_at_rest, make_case, make_llm, make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests import sample_tokens

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
DRAWN = dict(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def case(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


def samples(llm: LLM, prompts: Any, params: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[one["token_ids"] for one in out["outputs"]] for out in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kvcache_block_size=16, max_num_batched_tokens=7),
        dict(max_num_seqs=4),
        dict(HARD, max_num_seqs=9),
        dict(HARD, enable_prefix_caching=False),
        dict(tensor_parallel_size=2, kvcache_block_size=16),
    ],
    ids=repr,
)
def test_every_sample_equals_transformers(options: dict[str, Any], case: Case) -> None:
    """The prompt's last block is copied for each sample, on every rank."""
    params = [
        SamplingParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, n=1 + index % 4)
        for index, p in enumerate(case.params)
    ]
    with make_llm(case.path, **options) as llm:
        for _ in range(2):
            got = samples(llm, case.prompts, params)
            assert got == [[t] * p.n for t, p in zip(case.expected, params, strict=True)]
            audit_at_rest(llm)


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_for_all_samples(
    block_size: int, caching: bool, model_dir: Path
) -> None:
    """A prompt of 10 tokens, 8 samples: its full blocks once, and a last block for each."""
    options = dict(kvcache_block_size=block_size, enable_prefix_caching=caching)
    with make_llm(model_dir, **options) as llm:
        llm.add_request(PROMPT, SamplingParams(n=8, **DRAWN))
        llm.step()
        stats = llm.stats()
        assert (stats["prefill_tokens"], stats["num_running"]) == (10, 8)
        tails = 8 if 10 % block_size else 0
        assert stats["blocks_used"] == 10 // block_size + tails
        while not llm.is_finished():
            llm.step()
        assert llm.stats()["decode_tokens"] == 8 * 11
        assert llm.stats()["prefill_tokens"] == 10
        audit_at_rest(llm)


def test_samples_do_not_depend_on_their_neighbours(model_dir: Path) -> None:
    """Seeded samples: alone, among others, preempted, one sequence at a time."""
    one = SamplingParams(n=5, **DRAWN)
    with make_llm(model_dir) as llm:
        ((first, *rest),) = samples(llm, PROMPT, one)
        assert samples(llm, PROMPT, SamplingParams(**DRAWN)) == [[first]]
        assert samples(llm, PROMPT, SamplingParams(n=3, **DRAWN)) == [[first, *rest[:2]]]
        others = SamplingParams(n=2, temperature=1.0, max_tokens=20)
        crowd = samples(llm, [[1, 2], PROMPT, PROMPT, [3]], [others, one, others, others])
        assert crowd[1] == [first, *rest]
        unseeded = samples(llm, [PROMPT] * 2, SamplingParams(n=2, temperature=1.5, max_tokens=12))
    drawn = [tuple(ids) for ids in [first, *rest, *unseeded[0], *unseeded[1]]]
    assert len(set(drawn)) == len(drawn), "two samples of one stream"
    for options in (dict(max_num_seqs=1), dict(SMALL_POOL, num_kvcache_blocks=8)):
        with make_llm(model_dir, **options) as llm:
            assert samples(llm, PROMPT, one) == [[first, *rest]]


def test_each_sample_ends_at_its_own_stop(model_dir: Path) -> None:
    """The output's own fields are those of the first sample."""
    with make_llm(model_dir) as llm:
        params = SamplingParams(n=6, logprobs=1, **dict(DRAWN, ignore_eos=False, max_tokens=40))
        (plain,) = samples(llm, PROMPT, params)
        stop = plain[2][4]
        params = SamplingParams(
            n=6, logprobs=1, stop_token_ids=[stop], **dict(DRAWN, max_tokens=40)
        )
        (out,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert [one["index"] for one in out["outputs"]] == [*range(6)]
    for one in out["outputs"]:
        ids = one["token_ids"]
        assert (one["finish_reason"] == "stop") == (ids[-1] == stop) == (one["stop_reason"] == stop)
        assert len(one["logprobs"] or []) == len(ids)
        shown = ids[:-1] if one["finish_reason"] == "stop" else ids
        assert one["text"] == llm.tokenizer.decode(shown, skip_special_tokens=True)
    assert {one["finish_reason"] for one in out["outputs"]} == {"stop", "length"}
    first = out["outputs"][0]
    assert all(out[key] == first[key] for key in first if key != "index")  # type: ignore[literal-required]
    each, until = out["metrics"]["time_per_output_token"], out["metrics"]["end_to_end_time"]
    first_token = out["metrics"]["time_to_first_token"]
    assert each is not None and first_token is not None
    assert first_token + 39 * each == pytest.approx(until)


def test_a_stream_reports_each_sample(model_dir: Path) -> None:
    """Events of each sample by itself, its end told when it comes."""
    params = [SamplingParams(n=3, **DRAWN), SamplingParams(**DRAWN)]
    with make_llm(model_dir, **SMALL_POOL) as llm:
        outputs = llm.generate([PROMPT, [1]], params, use_tqdm=False)
        got: dict[tuple[int, int], dict[str, Any]] = {}
        for event in llm.stream([PROMPT, [1]], params):
            one = got.setdefault((event["index"], event["sample"]), dict(text="", token_ids=[]))
            assert one.get("finish_reason") is None, "an event comes after the last one"
            one["text"] += event["text"]
            one["token_ids"] += event["token_ids"]
            one["finish_reason"] = event["finish_reason"]
        assert llm.is_finished()
    assert got == {
        (index, one["index"]): {key: one[key] for key in ("text", "token_ids", "finish_reason")}  # type: ignore[literal-required]
        for index, out in enumerate(outputs)
        for one in out["outputs"]
    }


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_aborting_a_request_aborts_all_samples(num_steps: int, model_dir: Path) -> None:
    """Before the prompt is computed, in its middle, and while the samples run."""
    with make_llm(model_dir, max_num_batched_tokens=6, kvcache_block_size=4) as llm:
        request_id = llm.add_request(PROMPT, SamplingParams(n=4, **DRAWN))
        for _ in range(num_steps):
            llm.step()
        out = llm.abort_request(request_id)
        assert [one["finish_reason"] for one in out["outputs"]] == ["abort"] * 4
        expected = max(0, num_steps - 1)
        assert [len(one["token_ids"]) for one in out["outputs"]] == [expected] * 4
        assert llm.is_finished() and llm.stats()["num_aborted"] == 1
        assert not llm.requests._begun, "later steps still look for its first token"
        audit_at_rest(llm)


def test_more_samples_than_can_run_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`n` above `max_num_seqs`, and too many for the pool: some wait, all finish.

    They share their prompt's list, as those of long prompts do.
    """
    with make_llm(model_dir) as llm:
        expected = samples(llm, PROMPT, SamplingParams(n=40, **DRAWN))
    monkeypatch.setattr(sample_tokens, "LONG", 1)
    for options in (dict(max_num_seqs=7), dict(kvcache_block_size=4, num_kvcache_blocks=7)):
        with make_llm(model_dir, max_model_len=28, **options) as llm:
            assert samples(llm, PROMPT, SamplingParams(n=40, **DRAWN)) == expected
            audit_at_rest(llm)


def test_samples_survive_the_error_of_another_call(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call fails while samples wait or run; they continue from their tokens."""
    for num_steps in (0, 1, 2, 4):
        with make_llm(model_dir, max_num_batched_tokens=6) as llm:
            expected = samples(llm, PROMPT, SamplingParams(n=3, **DRAWN))
            request_id = llm.add_request(PROMPT, SamplingParams(n=3, **DRAWN))
            for _ in range(num_steps):
                llm.step()
            with monkeypatch.context() as patch:
                patch.setattr(llm.model_runner, "begin", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    llm.generate([1, 2, 3], use_tqdm=False)
            outputs = []
            while not llm.is_finished():
                outputs += llm.step()
            (out,) = outputs
            assert out["request_id"] == request_id
            assert [one["token_ids"] for one in out["outputs"]] == expected[0]
            audit_at_rest(llm)


@pytest.mark.cuda
def test_every_sample_equals_transformers_on_a_device(case: Case) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, n=1 + index % 4)
        for index, p in enumerate(case.params)
    ]
    options = dict(device="cuda", num_kvcache_blocks=2000, kvcache_block_size=16)
    with make_llm(case.path, attention_backend="torch", **options) as llm:
        got = samples(llm, case.prompts, params)
        assert got == [[t] * p.n for t, p in zip(case.expected, params, strict=True)]
        audit_at_rest(llm)
