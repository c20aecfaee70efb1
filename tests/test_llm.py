"""LLM and LLMEngine: what `generate` takes and returns, and how requests and engines end.

Engines run on the CPU with a small pool. The shared engine must be idle after every test.
"""

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import selection
import torch
from audits import audit_scheduler
from conftest import byte_tokenizer, edit_config, make_model
from reference import run_to_end
from transformers import AutoTokenizer, ByT5Tokenizer
from waiting import LIMIT

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "Hello, world!"
IDS = [3, 14, 15, 92, 65]
KEYS = {"request_id", "text", "token_ids", "finish_reason", "stop_reason", "num_prompt_tokens",
        "num_cached_tokens", "metrics", "logprobs", "cumulative_logprob", "outputs",
        "prompt", "prompt_token_ids", "prompt_logprobs"}  # fmt: skip


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **dict(device="cpu", kvcache_block_size=4, num_kvcache_blocks=128) | options)


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **dict(ignore_eos=True) | fields)


def generate(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, greedy() if params is None else params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def assert_idle(llm: LLM) -> None:
    """No request is queued, no block is held, no output waits to be returned."""
    audit_scheduler(llm.scheduler)
    manager = llm.scheduler.block_manager
    assert not llm.scheduler.waiting and not llm.scheduler.running
    assert manager.num_free_blocks == manager.num_blocks, "a block is still held"
    assert not llm.requests.unfinished and llm.is_finished() and llm.step() == []


def raise_at_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException
) -> None:
    """Make the runner's `nth` step from now raise `error`, once."""
    begin, steps = llm.model_runner.begin, iter(range(1, 1_000_000))

    def failing(batch: Batch) -> Any:
        if next(steps) == nth:
            raise error
        return begin(batch)

    monkeypatch.setattr(llm.model_runner, "begin", failing)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    """The engine that tests share, or an empty list after a test that failed."""
    unbroken: list[LLM] = []
    yield unbroken
    for llm in unbroken:
        llm.close()


@pytest.fixture
def llm(engines: list[LLM], model_dir: Path) -> Iterator[LLM]:
    """An engine, which must be idle and must work after the test."""
    llm = engines.pop() if engines else make_llm(model_dir)
    yield llm
    assert_idle(llm)
    assert generate(llm, IDS)[0]["finish_reason"] == "length"
    engines.append(llm)


# Prompts and results


@pytest.mark.parametrize(
    ("prompts", "same_as"),
    [
        (TEXT, [TEXT]),
        ([TEXT], [TEXT]),
        (IDS, [IDS]),
        ([IDS], [IDS]),
        ((TEXT, IDS), [TEXT, IDS]),
        ([TEXT, IDS, "x"], [TEXT, IDS, "x"]),
        (tuple(IDS), [IDS]),
        ([tuple(IDS), IDS[:2]], [IDS, IDS[:2]]),
        (range(5), [[0, 1, 2, 3, 4]]),
        (np.array(IDS), [IDS]),
        (np.array(IDS, dtype=np.uint8), [IDS]),
        (list(np.array(IDS)), [IDS]),
        (np.array([IDS, IDS[::-1]]), [IDS, IDS[::-1]]),
        ([np.array(IDS), TEXT], [IDS, TEXT]),
        (np.array(["ab", "c"]), ["ab", "c"]),
        (torch.tensor(IDS), [IDS]),
        ({"prompt": TEXT}, [TEXT]),
        ({"prompt_token_ids": IDS}, [IDS]),
        ({"prompt_token_ids": np.array(IDS), "prompt": "not read"}, [IDS]),
        ([{"prompt": TEXT, "prompt_token_ids": None}, TEXT, IDS], [TEXT, TEXT, IDS]),
        (torch.tensor([IDS, IDS[::-1]]), [IDS, IDS[::-1]]),
        ([torch.tensor(IDS), IDS], [IDS, IDS]),
        ((prompt for prompt in (TEXT, IDS)), [TEXT, IDS]),
        ([7], [[7]]),
        ("\0", ["\0"]),
        ("é 中 🙂", ["é 中 🙂".encode()]),
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:24]}",
)
def test_every_type_of_prompt_is_read(llm: LLM, prompts: Any, same_as: list[Any]) -> None:
    """A string is one prompt, a list of ids is one prompt; arrays and generators are accepted."""
    byte_to_id = byte_tokenizer().encode
    expected = [
        generate(llm, [byte_to_id(p.decode()) if isinstance(p, bytes) else p])[0] for p in same_as
    ]
    outputs = generate(llm, prompts)
    assert type(outputs) is list
    assert tokens(outputs) == tokens(expected)
    assert [o["num_prompt_tokens"] for o in outputs] == [len(list(p)) for p in same_as]


def test_an_output_has_its_prompt(llm: LLM) -> None:
    """The text as it was given, None for token ids alone, and the ids in any case."""
    ids = byte_tokenizer().encode(TEXT)
    outputs = generate(
        llm, [TEXT, IDS, {"prompt": TEXT}, {"prompt_token_ids": IDS, "prompt": "a text"}]
    )
    assert [o.prompt for o in outputs] == [TEXT, None, TEXT, "a text"]
    assert [o.prompt_token_ids for o in outputs] == [ids, IDS, ids, IDS]


@pytest.mark.parametrize("nothing", [[], (), np.array([]), iter([])], ids=lambda x: str(type(x)))
@pytest.mark.parametrize("params", [None, [], greedy()], ids=["None", "list", "one"])
def test_no_prompts_give_no_results(llm: LLM, nothing: Any, params: Any) -> None:
    """An empty list is no prompt, not an empty prompt; the rates do not divide by zero."""
    assert llm.generate(nothing, params, use_tqdm=False) == []


def test_the_callers_prompt_is_unchanged(llm: LLM) -> None:
    """Generated tokens are not appended to the caller's list."""
    prompt = list(IDS)
    generate(llm, [prompt, prompt])
    assert prompt == IDS


def test_finished_requests_are_freed(llm: LLM) -> None:
    """Nothing refers to their sequences or logprobs after `generate`."""
    params = SamplingParams(max_tokens=6, logprobs=2, n=2)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if isinstance(thing, Sequence)}
    llm.generate([TEXT] * 5, params, use_tqdm=False)
    gc.collect()
    after = [thing for thing in gc.get_objects() if isinstance(thing, Sequence)]
    assert not [seq for seq in after if id(seq) not in before]


def test_results_are_in_prompt_order(llm: LLM) -> None:
    """Shorter requests finish first, but their results keep their places."""
    lengths = [9, 1, 30, 2, 17, 5]
    prompts = [[40 + i] * (i + 1) for i in range(6)]
    alone = [
        generate(llm, prompt, greedy(n))[0] for prompt, n in zip(prompts, lengths, strict=True)
    ]
    together = generate(llm, prompts, [greedy(n) for n in lengths])
    assert [len(o["token_ids"]) for o in together] == lengths
    assert tokens(together) == tokens(alone)
    assert [o["num_prompt_tokens"] for o in together] == [1, 2, 3, 4, 5, 6]


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    """The nth entry of a list of parameters is for the nth prompt."""
    params = [greedy(3), SamplingParams(max_tokens=4, seed=1, ignore_eos=True), greedy(5)]
    outputs = generate(llm, [TEXT] * 3, tuple(params))
    assert [len(o["token_ids"]) for o in outputs] == [3, 4, 5]
    assert outputs[2]["token_ids"][:3] == outputs[0]["token_ids"]
    assert outputs[1] != outputs[0]


def test_without_parameters_the_defaults_apply(llm: LLM) -> None:
    """None means 64 tokens at temperature 1, not greedy."""
    (output,) = llm.generate(TEXT, None, use_tqdm=False)
    assert len(output["token_ids"]) == 64 or output["finish_reason"] == "stop"
    seeded = SamplingParams(seed=5, ignore_eos=True)
    given = dict(max_tokens=64, temperature=1.0, seed=5, ignore_eos=True)
    expected = tokens(generate(llm, TEXT, SamplingParams(**given)))
    assert tokens(generate(llm, TEXT, seeded)) == expected
    assert expected != tokens(generate(llm, TEXT, greedy(64)))


def test_output_has_these_keys_and_types(llm: LLM) -> None:
    (output,) = generate(llm, TEXT)
    assert set(output) == KEYS
    assert isinstance(output, dict)
    assert json.loads(json.dumps(output)) == output
    assert output["num_prompt_tokens"] == len(TEXT)
    assert (output["finish_reason"], output["stop_reason"]) == ("length", None)
    assert [type(token) for token in output["token_ids"]] == [int] * 8
    assert type(output["num_prompt_tokens"]) is type(output["num_cached_tokens"]) is int


def test_get_tokenizer_is_the_tokenizer_or_an_error(llm: LLM, copy_of_model: Any) -> None:
    assert llm.get_tokenizer() is llm.tokenizer
    path = copy_of_model()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).unlink()
    with make_llm(path) as other, pytest.raises(ValueError, match="has no tokenizer"):
        other.get_tokenizer()


def test_recommended_parameters_are_those_of_generation_config(
    model_dir: Path, copy_of_model: Callable[[], Path]
) -> None:
    """By our names; what is null or absent has our default. They do not apply by themselves."""
    path = copy_of_model()
    file = path / "generation_config.json"
    with make_llm(path) as other:
        for text, expected in (
            ("{}", SamplingParams()),
            (
                '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null,'
                ' "max_new_tokens": 9, "eos_token_id": 1, "transformers_version": "5"}',
                SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=9),
            ),
            ('{"do_sample": false, "repetition_penalty": 1.1}',
             SamplingParams(temperature=0, repetition_penalty=1.1)),
        ):  # fmt: skip
            file.write_text(text)
            assert other.get_default_sampling_params() == expected
        file.write_text('{"top_p": 7}')
        with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be .* got 7"):
            other.get_default_sampling_params()
        file.unlink()
        assert other.get_default_sampling_params() == SamplingParams()


def test_changing_an_output_changes_no_later_one(llm: LLM) -> None:
    """The output is the caller's own list, not one that the engine reads."""
    first = generate(llm, IDS)[0]["token_ids"]
    copy = list(first)
    first.clear()
    assert generate(llm, IDS)[0]["token_ids"] == copy


def test_cached_tokens_are_the_full_blocks_before_the_last_token(model_dir: Path) -> None:
    """The last token is always computed; without prefix caching nothing is cached."""
    prompt = [5, 6, 7, 8] * 3  # three blocks: the last token's is computed again
    with make_llm(model_dir) as llm:
        first, second, longer = (generate(llm, p)[0] for p in (prompt, prompt, [*prompt, 9]))
        assert [o["num_cached_tokens"] for o in (first, second, longer)] == [0, 8, 12]
        assert second["token_ids"] == first["token_ids"]
    with make_llm(model_dir, enable_prefix_caching=False) as llm:
        outputs = [generate(llm, prompt)[0] for _ in range(2)]
        assert [o["num_cached_tokens"] for o in outputs] == [0, 0]
        assert tokens(outputs) == [first["token_ids"]] * 2


def test_prompts_share_cached_prefixes_only_with_prompts_of_their_salt(llm: LLM) -> None:
    """Otherwise the time to the first token would tell a client what others have asked."""
    prompt = [9, 8, 7, 6] * 3
    forms: list[Any] = [
        prompt,
        *({"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "b", "a", None)),
        prompt,
    ]
    outputs = [generate(llm, form)[0] for form in forms]
    assert [o["num_cached_tokens"] for o in outputs] == [0, 0, 0, 8, 8, 8, 8]
    together = generate(llm, [{"prompt": TEXT, "cache_salt": salt} for salt in "ccdd"])
    hits = [o["num_cached_tokens"] for o in together]
    assert hits == [0, 12, 0, 12], "or one waits for a block of the other salt"
    assert len({tuple(ids) for ids in tokens(outputs)}) == 1
    assert [o.prompt for o in together] == [TEXT] * 4


def test_identical_prompts_in_one_batch_share_blocks(model_dir: Path) -> None:
    """The prompt is computed once; the other requests hit its blocks."""
    prompt = [5, 6, 7, 8] * 10
    with make_llm(model_dir) as llm:
        outputs = generate(llm, [prompt] * 4)
        assert [o["num_cached_tokens"] for o in outputs[1:]] == [36] * 3
        assert len({tuple(ids) for ids in tokens(outputs)}) == 1


# The end of a request


def first_new_token(token_ids: list[int], least: int = 1) -> int:
    """Index, `least` or more, of a token that does not occur before."""
    return next(i for i in range(least, len(token_ids)) if token_ids[i] not in token_ids[:i])


def test_max_tokens_1_generates_one_token(llm: LLM) -> None:
    (longer,), (output,) = generate(llm, TEXT, greedy(5)), generate(llm, TEXT, greedy(1))
    assert output["token_ids"] == longer["token_ids"][:1]
    assert output["finish_reason"] == "length"


def test_a_stop_token_id_ends_the_output_and_is_its_last_token(llm: LLM) -> None:
    """`stop_reason` names the token."""
    ref = generate(llm, TEXT, greedy(40))[0]["token_ids"]
    at = first_new_token(ref, 2)
    params = greedy(40, stop_token_ids=[1, ref[at]] if ref[at] != 1 else [1])
    (output,) = generate(llm, TEXT, params)
    assert output["token_ids"] == ref[: at + 1]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", ref[at])


@pytest.mark.parametrize("with_stop_strings", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_not_in_the_text_unless_it_is_included(
    llm: LLM, include: bool, with_stop_strings: bool
) -> None:
    """In `generate` and in `stream`; `token_ids` keep it."""
    ref = generate(llm, TEXT, greedy(40))[0].token_ids
    at = first_new_token(ref, 2)
    params = greedy(
        40, stop_token_ids=[ref[at]], include_stop_str_in_output=include,
        skip_special_tokens=False, stop=["never generated"] if with_stop_strings else None,
    )  # fmt: skip
    (output,) = generate(llm, TEXT, params)
    shown = ref[: at + 1] if include else ref[:at]
    assert output.text == byte_tokenizer().decode(shown, skip_special_tokens=False)
    assert output.token_ids == ref[: at + 1]
    events = list(llm.stream(TEXT, params))
    assert "".join(event.text for event in events) == output.text
    assert [i for event in events for i in event.token_ids] == output.token_ids


def test_a_stop_string_is_not_looked_for_in_a_stop_token(llm: LLM) -> None:
    """The token ends the output before its text is added."""
    ref = generate(llm, TEXT, greedy(40))[0].token_ids
    at = first_new_token(ref, 2)
    last = byte_tokenizer().decode(ref[at], skip_special_tokens=False)
    (output,) = generate(llm, TEXT, greedy(40, stop_token_ids=[ref[at]], stop=[last]))
    assert (output.stop_reason, output.token_ids) == (ref[at], ref[: at + 1])


def test_a_stop_on_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    ref = generate(llm, TEXT, greedy(40))[0]["token_ids"]
    at = first_new_token(ref, 2)
    (output,) = generate(llm, TEXT, greedy(at + 1, stop_token_ids=[ref[at]]))
    assert output["token_ids"] == ref[: at + 1]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", ref[at])


def test_the_first_token_can_stop(llm: LLM) -> None:
    """This token comes from the prefill step."""
    ref = generate(llm, TEXT)[0]["token_ids"]
    (output,) = generate(llm, TEXT, greedy(8, stop_token_ids=[ref[0]]))
    assert (output["token_ids"], output["stop_reason"]) == ([ref[0]], ref[0])


def test_stop_ids_in_the_prompt_do_not_stop(llm: LLM) -> None:
    ref = generate(llm, TEXT)[0]["token_ids"]
    (unused,) = (i for i in byte_tokenizer().encode("!") if i not in ref)
    (output,) = generate(llm, TEXT, greedy(8, stop_token_ids=[unused]))
    assert output["token_ids"] == ref


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer"])
def test_eos_is_read_from(place: str, llm: LLM, copy_of_model: Callable[[], Path]) -> None:
    """Any of these files may define a token that ends the output, unless `ignore_eos` is set."""
    path = copy_of_model()
    ref = generate(llm, TEXT, greedy(40))[0]["token_ids"]
    at = first_new_token(ref, 2)
    if place == "config":
        edit_config(path, eos_token_id=ref[at])
    elif place == "generation_config":
        (path / "generation_config.json").write_text(f'{{"eos_token_id": [257, {ref[at]}]}}')
    else:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ref[at])
        assert tokenizer.eos_token_id == ref[at]
        tokenizer.save_pretrained(path)
    with make_llm(path) as other:
        (stopped,) = generate(other, TEXT, greedy(40, ignore_eos=False))
        assert stopped["token_ids"] == ref[: at + 1]
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", None)
        (ignoring,) = generate(other, TEXT, greedy(40))
        assert ignoring["token_ids"] == ref
        assert ignoring["finish_reason"] == "length"
        (named,) = generate(other, TEXT, greedy(40, stop_token_ids=[ref[at]]))
        assert (named["finish_reason"], named["stop_reason"]) == ("stop", ref[at])


def test_text_is_what_the_tokenizer_decodes(llm: LLM, copy_of_model: Callable[[], Path]) -> None:
    """Decoded as a whole, without special tokens, which stay in `token_ids`."""
    ref = generate(llm, TEXT, greedy(40))[0]["token_ids"]
    special = ref[first_new_token(ref, 2)]
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(special)
    path = copy_of_model()
    tokenizer.save_pretrained(path)
    with make_llm(path) as other:
        (output,) = generate(other, TEXT, greedy(40))
    assert output["token_ids"] == ref
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert output["text"] == tokenizer.decode(ref, skip_special_tokens=True)
    assert output["text"] != tokenizer.decode(ref), "the special token is in the output"


def test_max_model_len_ends_a_request_with_more_max_tokens(model_dir: Path) -> None:
    """However large `max_tokens` is."""
    with make_llm(model_dir, max_model_len=20) as llm:
        (output,) = generate(llm, [1] * 15, greedy(10**18))
        assert (len(output["token_ids"]), output["finish_reason"]) == (5, "length")


def test_a_pool_smaller_than_the_models_length_lowers_max_model_len(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so once; a longer prompt is refused, a longer output ends there."""
    with make_llm(model_dir, num_kvcache_blocks=5) as llm:
        assert caplog.text.count("max_model_len is 20") == 1, "said once, and before it matters"
        assert "512" in caplog.text
        outputs = generate(llm, [[i + 1] * 12 for i in range(4)], greedy(1000))
        assert [len(o["token_ids"]) for o in outputs] == [8] * 4
        assert [o["finish_reason"] for o in outputs] == ["length"] * 4
        with pytest.raises(ValueError, match="20"):
            generate(llm, [1] * 20)
        assert caplog.text.count("max_model_len is 20") == 1
        assert_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"kvcache_block_size": 1, "num_kvcache_blocks": 40},
        {"kvcache_block_size": 512, "num_kvcache_blocks": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "kvcache_block_size": 1,
         "num_kvcache_blocks": 40, "max_model_len": 40},
        {"max_num_seqs": 10**15, "max_num_batched_tokens": 10**15},
    ],
    ids=str,
)  # fmt: skip
def test_extreme_options_give_the_same_output(
    llm: LLM, options: dict[str, Any], model_dir: Path
) -> None:
    prompts = [[7] * 17, [7] * 17, [7] * 12 + [9], [1]]
    with make_llm(model_dir, **options) as other:
        assert tokens(generate(other, prompts)) == tokens(generate(llm, prompts))
        assert_idle(other)


# The progress bar


def test_progress_bar_shows_the_rates(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT, IDS], greedy())
    out, err = capfd.readouterr()
    assert out == ""
    assert "2/2" in err
    assert re.search(r"[\d.]+k? tok/s out, avg [\d.]+k?, [\d.]+k? in, KV \d+%\]", err)


def test_use_tqdm_false_prints_nothing(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT, IDS], greedy(), use_tqdm=False)
    assert capfd.readouterr() == ("", "")


# Step by step


def test_steps_give_the_results_of_generate(llm: LLM) -> None:
    """Requests join at different steps; each output comes exactly once."""
    lengths = {3: 5, 4: 1, 9: 8, 11: 2}
    expected = {n: generate(llm, [n] * n, greedy(length))[0] for n, length in lengths.items()}
    added: dict[int, int] = {}
    outputs: dict[int, RequestOutput] = {}
    for n, length in lengths.items():
        added[llm.add_request([n] * n, greedy(length))] = n
        assert not llm.is_finished()
        for output in llm.step():
            assert output["request_id"] not in outputs
            outputs[output["request_id"]] = output
    for output in run_to_end(llm):
        assert output["request_id"] not in outputs
        outputs[output["request_id"]] = output
    assert outputs.keys() == added.keys(), "each request id once"
    for request_id, n in added.items():
        assert outputs[request_id]["token_ids"] == expected[n]["token_ids"]


def test_a_step_with_nothing_to_do_returns_nothing(llm: LLM) -> None:
    assert llm.is_finished()
    assert llm.step() == []


def test_each_step_generates_one_token(llm: LLM) -> None:
    llm.add_request(TEXT, greedy(3))
    assert [len(llm.step()) for _ in range(3)] == [0, 0, 1]


def test_outputs_of_earlier_requests_wait_for_step(llm: LLM) -> None:
    """A request that was added before `generate` and finishes in it is returned by a later step."""
    expected = generate(llm, TEXT, greedy(3))[0]
    short = llm.add_request(TEXT, greedy(3))
    long = llm.add_request(IDS, greedy(60))
    (output,) = generate(llm, IDS, greedy(20))
    assert output["request_id"] not in (short, long)
    assert not llm.is_finished()
    (first,) = llm.step()
    assert (first["request_id"], first["token_ids"]) == (short, expected["token_ids"])
    (second,) = run_to_end(llm)
    assert (second["request_id"], len(second["token_ids"])) == (long, 60)


def test_is_finished_is_false_while_an_output_waits(llm: LLM) -> None:
    """So that the loop `while not is_finished(): step()` returns every output."""
    request_id = llm.add_request(TEXT, greedy(2))
    generate(llm, IDS, greedy(10))
    assert not llm.is_finished()
    assert [o["request_id"] for o in run_to_end(llm)] == [request_id]


def test_outputs_that_wait_survive_a_failing_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that finished earlier is returned although another request's step raised."""
    waiting = llm.add_request(TEXT, greedy(2))
    generate(llm, IDS, greedy(10))
    other = llm.add_request(IDS, greedy(2))
    with monkeypatch.context() as patch:
        raise_at_step(llm, patch, 1, RuntimeError("device lost"))
        with pytest.raises(RuntimeError, match="device lost"):
            llm.step()
    assert sorted(o["request_id"] for o in run_to_end(llm)) == [waiting, other]


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_failing_step_is_repeated_exactly(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException
) -> None:
    """A step that raised runs again, once: no token is missing, none comes twice."""
    expected = tokens(generate(llm, [TEXT, IDS], [greedy(9), greedy(7)]))
    ids = [llm.add_request(TEXT, greedy(9)), llm.add_request(IDS, greedy(7))]
    with monkeypatch.context() as patch:
        raise_at_step(llm, patch, nth, error)
        with pytest.raises(type(error)):
            run_to_end(llm)
    audit_scheduler(llm.scheduler)
    outputs = {o["request_id"]: o["token_ids"] for o in run_to_end(llm)}
    assert outputs == dict(zip(ids, expected, strict=True))


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_abort_returns_what_was_generated(llm: LLM, num_steps: int) -> None:
    expected = generate(llm, TEXT, greedy(9))[0]["token_ids"][:num_steps]
    kept = llm.add_request(IDS, greedy(9))
    request_id = llm.add_request(TEXT, greedy(9))
    for _ in range(num_steps):
        assert llm.step() == []
    output = llm.abort_request(request_id)
    assert output["request_id"] == request_id
    assert output["token_ids"] == expected
    assert output["text"] == byte_tokenizer().decode(expected, skip_special_tokens=True)
    assert (output["finish_reason"], output["stop_reason"]) == ("abort", None)
    assert [o["request_id"] for o in run_to_end(llm)] == [kept]


def test_a_preempted_request_can_be_aborted(model_dir: Path) -> None:
    """It is in `waiting` again, with tokens; those are returned."""
    with make_llm(model_dir, num_kvcache_blocks=6) as llm:
        ids = [llm.add_request([n + 1] * 9, greedy(15)) for n in range(2)]
        while not llm.scheduler.num_preemptions:
            llm.step()
        output = llm.abort_request(ids[1])
        assert output["finish_reason"] == "abort"
        assert output["token_ids"]
        (other,) = run_to_end(llm)
        assert (other["request_id"], len(other["token_ids"])) == (ids[0], 15)
        assert_idle(llm)


def test_aborting_an_unknown_request_is_an_error(llm: LLM) -> None:
    """Unknown: never given, finished, aborted, or with an output that waits to be returned."""
    finished = generate(llm, TEXT)[0]["request_id"]
    aborted = llm.add_request(TEXT)
    llm.abort_request(aborted)
    unclaimed = llm.add_request(TEXT, greedy(1))
    generate(llm, IDS)
    for request_id in (finished, aborted, unclaimed, 10**9, -1, None, "7"):
        with pytest.raises((ValueError, TypeError), match="request_id") as caught:
            llm.abort_request(request_id)
        assert str(request_id) in str(caught.value)
    assert [o["request_id"] for o in llm.step()] == [unclaimed]


# Interruptions


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("nth", [1, 2, 6])
def test_an_interrupted_generate_removes_its_own_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException
) -> None:
    """Its blocks are free, the next call has no stale outputs, other requests go on."""
    expected = tokens(generate(llm, [TEXT, IDS, "x" * 30]))
    expected_other = generate(llm, "other", greedy(12))[0]["token_ids"]
    other = llm.add_request("other", greedy(12))
    with monkeypatch.context() as patch:
        raise_at_step(llm, patch, nth, error)
        with pytest.raises(type(error)):
            generate(llm, [TEXT, IDS, "x" * 30], [greedy(3), greedy(), greedy()])
    audit_scheduler(llm.scheduler)
    assert list(llm.requests.unfinished) == [other], "that call's requests, and no others, are gone"
    assert tokens(generate(llm, [TEXT, IDS, "x" * 30])) == expected
    (output,) = run_to_end(llm)
    assert (output["request_id"], output["token_ids"]) == (other, expected_other)


def test_ctrl_c_while_requests_are_queued_removes_them(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first step: the requests queued so far are removed."""
    llm = make_llm(model_dir)
    add, number = llm.scheduler.add, iter(range(100))

    def interrupted(seq: Any) -> None:
        add(seq)
        if next(number) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [TEXT] * 5)
    assert_idle(llm)


def test_the_engine_survives_a_signal_at_any_time(model_dir: Path) -> None:
    """A real interrupt at twenty different times; the next outputs are right."""
    prompts = [[n + 1] * (3 + 5 * n) for n in range(6)]
    params = [greedy(150 + 10 * n) for n in range(6)]
    with make_llm(model_dir, num_kvcache_blocks=200) as llm:

        def interrupted_after(seconds: float) -> None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            generate(llm, prompts, params)

        expected = tokens(generate(llm, prompts, greedy(30)))
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        gc.disable()  # hypothesis times collections in a callback, which swallows a Ctrl-C
        try:
            for n in range(20):
                with pytest.raises(KeyboardInterrupt):
                    interrupted_after(0.002 + 0.0031 * n)
                assert_idle(llm)
                assert tokens(generate(llm, prompts[:2], greedy(5))) == [
                    ids[:5] for ids in expected[:2]
                ]
        finally:
            gc.enable()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert tokens(generate(llm, prompts, greedy(30))) == expected
        assert_idle(llm)


Line = tuple[str, int]


class InterruptAt:
    """Send Ctrl-C before a line of the engine's host side is executed for the nth time."""

    FILES: ClassVar[set[str]] = {
        str(Path(nanovllm.__file__).parent / name)
        for name in ("llm.py", "engine/llm_engine.py", "engine/schedule/scheduler.py",
                     "engine/cache/block_manager.py", "engine/schedule/sequence.py",
                     "engine/schedule/forecast.py",
                     "engine/run/model_runner.py", "engine/requests/request.py")
    }  # fmt: skip

    def __init__(self, line: Line | None = None, nth: int = 1) -> None:
        self.line, self.nth = line, nth
        self.executed: Counter[Line] = Counter()

    def __enter__(self) -> "InterruptAt":
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.FILES else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.executed[line] += 1
            if line == self.line and self.executed[line] == self.nth:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line

    @property
    def struck(self) -> bool:
        return self.line is not None and self.executed[self.line] >= self.nth


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
def test_the_engine_survives_ctrl_c_before_any_line(model_dir: Path) -> None:
    """Ctrl-C before each line of the engine's bookkeeping leaves queues and blocks consistent.

    Python may deliver it between any two lines. A queue that has lost a sequence, or a block that
    has lost its owner, would spoil every later call.
    """
    options: dict[str, Any] = dict(
        num_kvcache_blocks=11, max_model_len=44, max_num_seqs=4, max_num_batched_tokens=16
    )
    prompts, params = ["hello", "worl", "abcdefghijklmnopq"], greedy(4)
    llm = make_llm(model_dir, **options)
    expected = generate(llm, "hello", params)[0]["token_ids"]
    expected_other = generate(llm, "xyzzy plugh", params)[0]["token_ids"]

    def interrupt(line: Line | None = None, nth: int = 1) -> tuple[Counter[Line], str | None]:
        """Return how often each line was executed, and what is wrong after the interrupt."""
        other = llm.add_request("xyzzy plugh", params)
        trace = InterruptAt(line, nth)
        try:
            with trace:
                generate(llm, prompts, params)
            if trace.struck:
                return trace.executed, "the Ctrl-C is swallowed"
        except KeyboardInterrupt:
            pass
        except Exception as error:
            return trace.executed, f"{error!r} instead of KeyboardInterrupt"
        try:
            audit_scheduler(llm.scheduler)
            if set(llm.requests.unfinished) - {other}:
                return trace.executed, "requests are left behind"
            finished = run_to_end(llm)
            if [o["request_id"] for o in finished] != [other]:
                return trace.executed, "another's output is lost, or a stale one comes"
            if finished[0]["token_ids"] != expected_other:
                return trace.executed, "another's output is wrong"
            if generate(llm, "hello", params)[0]["token_ids"] != expected:
                return trace.executed, "the next output is wrong"
            assert_idle(llm)
        except Exception as error:
            return trace.executed, f"{type(error).__name__}: {error}"
        return trace.executed, None

    executed, wrong = interrupt()
    assert wrong is None
    assert len(executed) > 80, "the trace sees the engine's lines"
    assert llm.scheduler.num_preemptions, "the pool is too large for preemptions"
    broken: dict[Line, str] = {}
    for line, times in selection.sample(sorted(executed.items()), 0.4, "interrupted lines"):
        for nth in sorted({1, times // 2 + 1}):
            _, wrong = interrupt(line, nth)
            if wrong is not None:
                broken[line] = wrong
                llm.close()
                llm = make_llm(model_dir, **options)
    llm.close()
    report = "\n".join(f"{Path(file).name}:{line}: {what}" for (file, line), what in broken.items())
    assert not broken, f"{len(broken)} of {len(executed)} lines\n{report}"


def test_ctrl_c_in_any_function_reaches_the_caller(model_dir: Path) -> None:
    """Also at the entry of a library's function or of an object's clean-up."""
    entered: set[CodeType] = set()
    struck: CodeType | None = None

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        entered.add(frame.f_code)
        if frame.f_code is struck:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    def run() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            generate(llm, ["hello", "worl"], greedy(4))
        finally:
            sys.settrace(before)

    swallowed = []
    with make_llm(model_dir) as llm:
        run()
        entered.clear()
        run()
        named = [code for code in entered if not code.co_name.startswith("<")]
        assert len(named) > 100, "the trace sees what is called"
        for struck in named:
            entered.clear()
            try:
                run()
            except KeyboardInterrupt:
                continue
            if struck in entered:
                swallowed.append(struck.co_qualname)
    assert not swallowed


def test_a_failing_tokenizer_leaves_no_requests(tmp_path: Path) -> None:
    """Python tokenizers raise on unknown ids; the clean-up decodes such ids, too."""
    model = make_model(tmp_path / "model", vocab_size=600)
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")  # it knows 384
    with make_llm(model, tokenizer=tmp_path / "byt5") as llm:
        prompts = [[n] * 3 for n in range(3, 12)]
        failed = False
        for seed in range(3):
            params = [
                SamplingParams(temperature=2.0, seed=seed, max_tokens=n + 1, ignore_eos=True)
                for n in range(len(prompts))
            ]
            try:
                generate(llm, prompts, params)
            except Exception:
                failed = True
            assert_idle(llm)
        assert failed, "no unknown id was drawn, so this test shows nothing"


# The end of an engine


@pytest.mark.parametrize(
    "options", [{}, dict(overlap=True), dict(tensor_parallel_size=2)], ids=repr
)
def test_close_from_another_thread_ends_a_call(options: dict[str, Any], model_dir: Path) -> None:
    """The call raises, and no rank is left waiting for another."""
    llm = make_llm(model_dir, **options)
    begin, begun = llm.model_runner.begin, threading.Event()

    def launching(*arguments: Any) -> Any:
        begun.set()
        return begin(*arguments)

    llm.model_runner.begin = launching  # type: ignore[method-assign]
    closer = threading.Thread(target=lambda: (begun.wait(), llm.close()))
    closer.start()
    with pytest.raises(RuntimeError, match="closed in the middle of the call"):
        generate(llm, [IDS] * 3, greedy(400))
    closer.join()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        generate(llm, IDS)
    llm.close()


def test_a_signal_handler_may_close_the_engine(model_dir: Path) -> None:
    """As handlers of SIGTERM do; the call that was interrupted raises an error that says so."""
    llm = make_llm(model_dir)
    begin, steps = llm.model_runner.begin, itertools.count()

    def launching(*arguments: Any) -> Any:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGALRM)
        return begin(*arguments)

    llm.model_runner.begin = launching  # type: ignore[method-assign]
    before = signal.signal(signal.SIGALRM, lambda *_: llm.close())
    try:
        with pytest.raises(RuntimeError, match="closed in the middle of the call"):
            generate(llm, [IDS] * 3, greedy(500))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not llm._finalizer.alive


def test_close_twice_is_harmless(model_dir: Path) -> None:
    llm = make_llm(model_dir)
    generate(llm, TEXT)
    llm.close()
    llm.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(TEXT),
        lambda llm: llm.generate([]),
        lambda llm: llm.add_request(TEXT),
        lambda llm: llm.step(),
        lambda llm: llm.abort_request(0),
    ],
    ids=["generate", "generate nothing", "add_request", "step", "abort_request"],
)
def test_a_closed_engine_refuses_calls(model_dir: Path, call: Callable[[LLM], Any]) -> None:
    """With an error that says that it is closed; `repr` still works."""
    llm = make_llm(model_dir)
    llm.add_request(TEXT)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        call(llm)
    assert repr(llm).startswith("LLM(")


def test_a_with_block_closes_the_engine(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        assert isinstance(llm, LLM)
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()
    with pytest.raises(ZeroDivisionError), make_llm(model_dir) as llm:
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_short_prompts_use_the_same_blocks_again(
    model_dir: Path, enable_prefix_caching: bool
) -> None:
    """On a CPU a block takes memory when it is first written. No prompt can find these."""
    options = dict(kvcache_block_size=16, num_kvcache_blocks=512)
    with make_llm(model_dir, enable_prefix_caching=enable_prefix_caching, **options) as llm:
        for call in range(10):
            generate(llm, [[call, index] for index in range(20)], greedy(3))
        cache = llm.model_runner.shard.caches.kv.cache
        assert cache is not None
        assert int((cache != 0).any(-1).any(0).sum()) == 20


@pytest.mark.parametrize("options", [{}, dict(enable_lora=True, max_lora_rank=4)])
@pytest.mark.parametrize("how", ["close", "del"])
def test_the_pool_is_freed_with_the_engine(
    options: dict[str, Any], model_dir: Path, how: str
) -> None:
    """Without the garbage collector: no reference cycle, no registry holds the runner."""
    llm = make_llm(model_dir, **options)
    generate(llm, TEXT)
    llm.embed(TEXT, use_tqdm=False)  # its parts must not keep it alive either
    assert llm.weight_shapes() and not llm.is_sleeping
    llm.add_request(TEXT)  # a pending request must not keep it alive
    shard = llm.model_runner.shard
    layer_cache = shard.model.attentions[0].kv.k_cache  # a part of the pool's memory
    parts = [*map(weakref.ref, (shard.caches.kv.cache, layer_cache, shard.model))]
    del shard, layer_cache
    gc.disable()
    try:
        if how == "del":
            parts.append(weakref.ref(llm))
            del llm
        else:
            llm.close()
        assert [part() is None for part in parts] == [True] * len(parts)
    finally:
        gc.enable()


def test_an_error_resets_what_follows_the_tokens(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error may strike while a text is being added to."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop="never there")
    with make_llm(model_dir) as llm:
        (expected,) = llm.generate(TEXT, params, use_tqdm=False)
        request_id = llm.add_request(TEXT, params)
        for _ in range(3):
            llm.step()
        (seq,) = llm.requests.unfinished[request_id].seqs
        seq.parts.text._pieces = ["half done"]
        with monkeypatch.context() as patch:
            patch.setattr(llm.scheduler, "postprocess", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        (output,) = run_to_end(llm)
        assert output.text == expected.text and len(output.token_ids) == 8


def test_an_engine_whose_step_failed_is_freed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps no exception, as its frames would refer to the engine."""
    llm = make_llm(model_dir)
    with monkeypatch.context() as patch:
        raise_at_step(llm, patch, 2, RuntimeError("device lost"))
        with pytest.raises(RuntimeError, match="device lost"):
            generate(llm, TEXT)
    dead = weakref.ref(llm.model_runner.shard.caches.kv.cache)
    del llm
    gc.collect()  # the exception's own cycle is the test's
    assert dead() is None


def test_engines_one_after_another_do_not_grow_the_process(model_dir: Path) -> None:
    """Pools, packed weights and tables are freed with each engine."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")

    def resident_mib() -> float:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def live() -> None:
        llm = make_llm(model_dir, num_kvcache_blocks=8192)  # 16 MiB
        generate(llm, TEXT, greedy(2))

    live()
    before = resident_mib()
    for _ in range(12):
        live()
    assert resident_mib() - before < 64, "a third of the pools"


def test_two_engines_in_turns_are_independent(llm: LLM, tmp_path: Path) -> None:
    """No module state belongs to the engine that ran last."""
    other_path = make_model(tmp_path / "other", seed=3)
    with make_llm(other_path, kvcache_block_size=16) as other:
        pairs = [(llm, TEXT), (other, IDS), (llm, IDS), (other, TEXT)]
        alone = [generate(engine, prompt)[0]["token_ids"] for engine, prompt in pairs]
        ids = [engine.add_request(prompt, greedy()) for engine, prompt in pairs]
        assert len(set(ids)) == 4
        outputs: dict[int, list[int]] = {}
        while not (llm.is_finished() and other.is_finished()):
            for output in llm.step() + other.step():
                outputs[output["request_id"]] = output["token_ids"]
        assert [outputs[request_id] for request_id in ids] == alone
        other.close()
        assert generate(llm, TEXT)[0]["token_ids"] == alone[0]


def test_two_engines_in_two_threads_are_independent(llm: LLM, model_dir: Path) -> None:
    """The layers of an engine read the step context of their own engine only."""
    prompts = [[n + 1] * 20 for n in range(8)]
    params = greedy(60)
    expected = tokens(generate(llm, prompts, params))
    with make_llm(model_dir) as other:
        results: dict[str, Any] = {}

        def work(name: str, engine: LLM, size: int) -> None:
            try:
                results[name] = tokens(generate(engine, prompts[:size], params))
            except Exception as error:
                results[name] = error

        threads = [
            threading.Thread(target=work, args=("first", llm, 8)),
            threading.Thread(target=work, args=("second", other, 5)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"first": expected, "second": expected[:5]}


def test_generate_works_in_a_thread(llm: LLM) -> None:
    """Nothing needs what only the main thread has: signal handlers, an event loop."""
    expected = tokens(generate(llm, TEXT))
    results: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: results.append(tokens(generate(llm, TEXT))))
    thread.start()
    thread.join()
    assert results == [expected]


def test_torch_state_of_engine_and_caller_are_independent(model_dir: Path) -> None:
    """The engine changes neither the caller's random state nor its defaults, and ignores both."""
    before = torch.get_rng_state()
    with make_llm(model_dir) as llm:
        expected = tokens(llm.generate(TEXT, SamplingParams(seed=1), use_tqdm=False))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with make_llm(model_dir) as llm:
            outputs = llm.generate(TEXT, SamplingParams(seed=1), use_tqdm=False)
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert tokens(outputs) == expected


def test_the_callers_autocast_has_no_effect(llm: LLM) -> None:
    """`generate` inside a training loop's autocast gives the same tokens."""
    expected = tokens(generate(llm, [TEXT, IDS]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokens(generate(llm, [TEXT, IDS])) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e39, 1.7e308])
def test_extreme_temperatures_give_tokens_without_warnings(llm: LLM, temperature: float) -> None:
    """Some of these are 0 or infinite as float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=5, ignore_eos=True)
        (output,) = generate(llm, TEXT, params)
    assert len(output["token_ids"]) == 5
    if temperature < 1:
        assert output["token_ids"] == tokens(generate(llm, TEXT, greedy(5)))[0]
    else:
        assert len(set(output["token_ids"])) > 1, "nearly uniform: 1 in 4e9 runs of a right one"


@pytest.mark.slow
def test_the_interpreter_exits_cleanly_with_open_engines(model_dir: Path) -> None:
    """Exit code 0, no traceback from a destructor, no hang."""
    script = f"""
import nanovllm
from nanovllm import LLM, SamplingParams
def make():
    return LLM({str(model_dir)!r}, device="cpu", num_kvcache_blocks=64)
closed, busy, idle = make(), make(), make()
cycle = [make()]
cycle.append(cycle)
del cycle
closed.close()
busy.add_request([1, 2, 3])
busy.step()
print(len(idle.generate([[1, 2], "ab"], SamplingParams(max_tokens=2), use_tqdm=False)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_call_inside_a_call_is_an_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls would step one scheduler."""
    llm = make_llm(model_dir)
    begin = llm.model_runner.begin

    def reentrant(batch: Any) -> Any:
        for call in (lambda: generate(llm, TEXT), llm.step):
            with pytest.raises(RuntimeError, match="already"):
                call()
        return begin(batch)

    expected = generate(llm, TEXT)[0]["token_ids"]
    monkeypatch.setattr(llm.model_runner, "begin", reentrant)
    assert generate(llm, TEXT)[0]["token_ids"] == expected
    assert_idle(llm)


def test_arguments_of_the_wrong_type_are_refused(llm: LLM) -> None:
    """They would be taken for other arguments of vLLM's, or for their truth value."""
    with pytest.raises(TypeError, match="use_tqdm must be True or False, got 'no'"):
        llm.generate(TEXT, greedy(), use_tqdm="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional arguments"):
        llm.chat([{"role": "user", "content": "Hi"}], greedy(), False, None, None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="add_generation_prompt must be True or False, got None"):
        llm.chat([{"role": "user", "content": "Hi"}], add_generation_prompt=None)  # type: ignore[arg-type]
    for request_id in ([1], "1", None):
        with pytest.raises(
            ValueError, match=f"unfinished request, got {request_id!r}".replace("[", r"\[")
        ):
            llm.abort_request(request_id)  # type: ignore[arg-type]
