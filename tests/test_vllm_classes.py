"""vLLM's classes and calls: engines by step and by event loop, arguments, hints, logprobs by id."""

import argparse
import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
from waiting import LIMIT

import nanovllm
from nanovllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
)
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.remote.async_engine import params_of
from nanovllm.from_vllm.refusals import refuse_others
from nanovllm.outputs import StreamEvent, TokenLogprob
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.token_logprobs import TokenLogprobs

pytestmark = pytest.mark.usefixtures("one_thread")
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
OPTIONS: dict[str, Any] = dict(device="cpu", cpu_kvcache_gib=0.01, max_model_len=64)
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=8)
SUMS = {"12+34=": "46", "7+8=": "15", "250+250=": "500"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EMBEDDED_MODEL, **OPTIONS) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_prompts_may_be_token_ids_by_keyword(llm: LLM) -> None:
    """With texts, they are the texts' ids, as in vLLM's early versions."""
    params, ids = SamplingParams(**GREEDY), [[*text.encode()] for text in SUMS]
    asked: Any = dict(sampling_params=params, use_tqdm=False)
    assert texts(llm.generate(prompt_token_ids=ids, **asked)) == [*SUMS.values()]
    assert texts(llm.generate(prompt_token_ids=ids[0], **asked)) == ["46"]
    outputs = llm.generate([*SUMS], params, prompt_token_ids=ids, use_tqdm=False)
    assert [(o.prompt, o.prompt_token_ids) for o in outputs] == [*zip(SUMS, ids, strict=True)]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "generate needs prompts, got None"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [[1]]}, r"as many as prompts \(2\), got 1"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be lists of token ids, got 'ab'"),
        ({"prompts": [[1]], "prompt_token_ids": [[1]]}, "prompts must be texts where"),
        ({"prompts": ["a"], "priority": 1}, "priority must be a list with an int for each prompt"),
        ({"prompts": ["a"], "priority": [1, 2]}, r"priority must be as many as prompts \(1\)"),
        ({"prompts": ["a"], "priority": [1.5]}, "priority must be an int"),
        ({"prompts": ["a"], "prompt_adapter_request": 5}, "prompt_adapter_request=5: see lora_req"),
        ({"prompts": ["a"], "priorty": [1]}, "unknown keyword of generate 'priorty'; did you"),
    ],
)
def test_other_keywords_of_generate_are_refused(llm: LLM, given: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        llm.generate(**given)


def test_priorities_decide_who_runs_first() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(EMBEDDED_MODEL, max_num_seqs=1, **OPTIONS) as llm:
        outputs = llm.generate(["1", "2", "3"], params, use_tqdm=False, priority=[5, -1, 2])
    assert params.priority == 0
    waits = [output.metrics.queue_time for output in outputs]
    assert sorted(waits) == [waits[1], waits[2], waits[0]]


def test_two_priorities_are_an_error(llm: LLM) -> None:
    """That of the parameters was ignored; 0, the default, is none."""
    params, words = SamplingParams(priority=3), "^priority=5: the SamplingParams have priority=3"
    with pytest.raises(ValueError, match=words):
        llm.generate(["a", "b"], params, use_tqdm=False, priority=[3, 5])
    with pytest.raises(ValueError, match=words):
        llm.llm_engine.add_request("a", "a", params, priority=5)
    with pytest.raises(ValueError, match=words):
        params_of(params, 5)
    assert params_of(params, 3).priority == params_of(None, 3).priority == 3


def test_requests_keep_their_parameters_when_the_callers_change(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, ignore_eos=True)
    number, stream = llm.add_request("1+1=", params), llm.stream("1+1=", params)
    llm.llm_engine.add_request("mine", "1+1=", params)
    params.max_tokens, params.logprobs = 1, 2  # type: ignore[misc]
    assert sum(len(event.token_ids) for event in stream) == 8
    engine, last = llm.llm_engine, {}
    while engine.has_unfinished_requests():
        last = {output.request_id: output for output in engine.step()}
    assert len(last["mine"].outputs[0].token_ids) == 8
    while not llm.is_finished():
        (output,) = llm.step()
    assert output.request_id == number and len(output.token_ids) == 8
    assert output.logprobs is None


def test_an_engine_returns_outputs_of_every_step(llm: LLM) -> None:
    """Everything so far, the new part, or the end alone; with names of the caller's."""
    engine = llm.llm_engine
    for kind in RequestOutputKind:
        params = SamplingParams(**GREEDY, logprobs=1, output_kind=kind)
        assert engine.add_request(kind.name, "250+250=", params) == kind.name
    with pytest.raises(ValueError, match="request_id 'DELTA' is that of another request"):
        engine.add_request("DELTA", "1", SamplingParams())
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    found: dict[str, list[RequestOutput]] = {kind.name: [] for kind in RequestOutputKind}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id].append(output)
    (want,) = llm.generate("250+250=", SamplingParams(**GREEDY, logprobs=1), use_tqdm=False)
    assert texts(found["CUMULATIVE"]) == ["5", "50", "500", "500"]
    assert texts(found["DELTA"]) == ["5", "0", "0", ""]
    assert texts(found["FINAL_ONLY"]) == ["500"]
    for outputs in found.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert outputs[-1].metrics.decode_time is not None
    for name in ("CUMULATIVE", "FINAL_ONLY"):
        last = found[name][-1]
        assert last["outputs"] == want["outputs"] and last.prompt == want.prompt
        assert [len(one.outputs[0].logprobs or ()) for one in found["CUMULATIVE"]] == [1, 2, 3, 4]


def test_an_engine_aborts_by_name_and_knows_the_llms_methods(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", "1+1=", SamplingParams(n=2, max_tokens=9, ignore_eos=True))
    engine.add_request("b", {"prompt_token_ids": [49, 61]}, priority=3)
    assert [len(output.outputs) for output in engine.step()] == [2, 1]
    engine.abort_request(["a", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("b")
    assert not engine.has_unfinished_requests() and engine.step() == []
    assert engine.get_tokenizer() is llm.get_tokenizer()
    assert engine.model_config.max_model_len == 64
    with pytest.raises(TypeError, match="request_id must be a text, got 5"):
        engine.add_request(5, "a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trace_headers must be None"):
        engine.add_request("c", "a", SamplingParams(), trace_headers={"a": "b"})
    assert engine.get_num_unfinished_requests() == 0


def test_what_vllm_passes_itself_is_taken() -> None:
    """Scripts write out defaults, and those of vLLM are not None."""

    async def first(**given: Any) -> Any:
        return await anext(AsyncLLMEngine.generate(cast(Any, None), "a", **given))

    refuse_others("call", dict(
        enable_log_requests=False, disable_log_requests=True, disable_log_stats=True,
        enable_multiprocessing=False, start_engine_loop=True, tokenization_kwargs={}, other=None,
    ))  # fmt: skip
    for make in (LLMEngine.from_engine_args, AsyncLLM.from_engine_args):
        with pytest.raises(TypeError, match="engine_args must be"):
            make(EMBEDDED_MODEL, enable_log_requests=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_engine_loop must be None or True, got False"):
        AsyncLLMEngine.from_engine_args(cast(Any, EMBEDDED_MODEL), start_engine_loop=False)
    with pytest.raises(ValueError, match="generate: trace_headers must be None, got"):
        asyncio.run(first(trace_headers={"a": "b"}))
    with pytest.raises(AttributeError, match="NoneType"):
        asyncio.run(first(trace_headers=None))


def test_arguments_make_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """By vLLM's names, from a command line, and as a dict."""
    args = EngineArgs(EMBEDDED_MODEL, block_size=32, seed=3, **OPTIONS)
    assert args.kvcache_block_size == 32
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: see tensor_parallel_size"):
        EngineArgs(EMBEDDED_MODEL, pipeline_parallel_size=2)
    with pytest.raises(TypeError, match="engine_args must be an EngineArgs, got str"):
        LLMEngine.from_engine_args(EMBEDDED_MODEL)  # type: ignore[arg-type]
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    words = ["--model", EMBEDDED_MODEL, "--block-size", "32", "--seed", "3"]
    words += ["--device", "cpu", "--cpu-kvcache-gib", "0.01", "--max-model-len", "64"]
    assert EngineArgs.from_cli_args(parser.parse_args(words)) == args
    words += [
        "--trust-remote-code",
        "--no-enable-log-requests",
        "--task",
        "generate",
        "--swap-space",
        "4",
    ]
    parser.set_defaults(block_size=64, tool_call_parser="hermes", trust_remote_code=True)
    more = dataclasses.replace(args, tool_parser="hermes")
    assert EngineArgs.from_cli_args(parser.parse_args(words)) == more
    found = EngineArgs.from_cli_args(parser.parse_args(words[:2]))
    assert found.kvcache_block_size == 64
    with pytest.raises(SystemExit):
        parser.parse_args(["--pipeline-parallel-size", "2"])
    assert "--pipeline-parallel-size 2: " in capsys.readouterr().err
    engine = LLMEngine.from_engine_args(args)
    with engine.llm as llm:
        assert llm.asked == Config(**dataclasses.asdict(args))


def test_an_engine_forgets_a_request_at_its_end() -> None:
    """Also while others are open: a server's loop may never be without one."""
    with LLM(EMBEDDED_MODEL, **OPTIONS) as llm:
        engine = LLMEngine(llm)
        engine.add_request("long", "1+1=", SamplingParams(max_tokens=40, ignore_eos=True))
        for number in range(3):
            engine.add_request(str(number), "1+1=", SamplingParams(max_tokens=1))
            while engine.get_num_unfinished_requests() > 1:
                engine.step()
            assert len(engine._open.stream.reported) == 1


async def collected(outputs: Any) -> list[Any]:
    return [output async for output in outputs]


def test_an_async_engine_yields_vllms_outputs() -> None:
    async def run() -> None:
        args = AsyncEngineArgs(EMBEDDED_MODEL, **OPTIONS)
        engine = AsyncLLM.from_engine_args(args)
        assert type(engine) is AsyncLLMEngine
        plain = SamplingParams(**GREEDY, n=2)
        so_far = await collected(engine.generate("12+34=", plain, "mine"))
        assert {output.request_id for output in so_far} == {"mine"}
        assert [sample.text for sample in so_far[-1].outputs] == ["46", "46"]
        assert so_far[-1].finished and so_far[-1].metrics.prefill_time > 0
        if len(so_far) > 1:
            assert not so_far[0].finished
        delta = dataclasses.replace(plain, n=1, output_kind=DELTA)
        parts = await collected(AsyncLLM.generate(engine, "12+34=", delta, request_id="d"))
        assert "".join(texts(parts)) == "46"
        (whole,) = await collected(
            engine.generate("12+34=", dataclasses.replace(delta, output_kind=FINAL_ONLY), "f")
        )
        assert (whole.request_id, whole.outputs[0].text) == ("f", "46")
        (first, *_) = events = await collected(AsyncLLM.generate(engine, "12+34=", plain, "e"))
        assert type(first) is StreamEvent and len(events) >= 2
        chat = engine.chat([{"role": "user", "content": "7+8="}], SamplingParams(**GREEDY))
        assert "".join(event.delta.get("content") or "" for event in await collected(chat)) == "15"
        with pytest.raises(ValueError, match="output_kind is for"):
            await collected(engine.chat([{"role": "user", "content": "7+8="}], delta))
        long = SamplingParams(max_tokens=50, ignore_eos=True)
        async for _ in engine.generate("1", long, "left"):
            break
        outputs = []
        async for output in engine.generate("1", long, "aborted"):
            outputs.append(output)
            await engine.abort(["aborted", "unknown"])
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert await engine.collective_rpc(worker_name, args=("!",)) == ["CausalLM!"]
        assert engine.is_running and not engine.errored
        assert (await engine.get_model_config()).max_model_len == 64
        for name, hint in (("shutdown_background_loop", "use shutdown"), ("aborts", "'abort'?")):
            with pytest.raises(
                AttributeError, match=rf"AsyncLLMEngine has no .*{re.escape(hint)}$"
            ):
                getattr(engine, name)
        engine.shutdown()
        assert engine.errored
        with pytest.raises(RuntimeError, match="closed"):
            await engine.check_health()

    asyncio.run(run())


def test_streams_of_llm_have_no_other_form(llm: LLM) -> None:
    with pytest.raises(ValueError, match="output_kind is for llm"):
        llm.stream("a", SamplingParams(output_kind=DELTA))
    (output,) = llm.generate("7+8=", SamplingParams(**GREEDY, output_kind="delta"), use_tqdm=False)
    assert output.text == "15"


def test_logprobs_are_dicts_by_token_id(llm: LLM) -> None:
    """As in vLLM, where the list in `output["logprobs"]` has tokens by place."""
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=0)
    (output,) = llm.generate("12+34=", params, use_tqdm=False)
    sample = output.outputs[0]
    assert sample.logprobs is not None and output.prompt_logprobs is not None
    for token_id, entry, tokens in zip(
        sample.token_ids, sample.logprobs, sample["logprobs"], strict=True
    ):
        assert entry[token_id] is tokens[0] and token_id in entry
        assert [*entry] == [token["token_id"] for token in tokens]
        assert [*entry.values()] == tokens and dict(entry.items()) == entry
        assert entry[token_id].decoded_token == tokens[0]["text"]
    assert output.logprobs == sample.logprobs and output.logprobs is output.logprobs
    prompt = output.prompt_logprobs
    assert prompt[0] is None
    assert [next(iter(entry)) for entry in prompt[1:] if entry] == output.prompt_token_ids[1:]
    assert json.loads(json.dumps(output["logprobs"])) == output["logprobs"]


def test_a_place_is_not_taken_for_a_token_id() -> None:
    """A list's user gets an error, or a warning where there is such a token."""
    tokens = [TokenLogprob(token_id=number, text="", logprob=-1.0, rank=1) for number in (9, 7, 1)]
    entry = TokenLogprobs(tokens)
    assert entry.first is tokens[0]
    with pytest.raises(KeyError, match="no token 0 in this entry, a dict by token id"):
        entry[0]
    with pytest.raises(KeyError, match="no token -1"):
        entry[-1]
    with pytest.warns(UserWarning, match=r"entry\[1\] is the token with this id, as in vLLM"):
        assert entry[1] is tokens[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert entry[9] is tokens[0] and entry.get(0) is None
        assert TokenLogprobs(tokens[::-1][:2])[7] is tokens[1]
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_prefixes_are_not_read_where_a_request_says_so(llm: LLM) -> None:
    """It writes them all the same."""
    prompt, found = "1+2=" * 10, []
    llm.reset_prefix_cache()
    for skip in (True, False, True, None):
        params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=skip)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        found.append(output.num_cached_tokens)
    assert found == [0, 32, 0, 32]


def test_preemptions_are_counted() -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    options = OPTIONS | dict(num_kvcache_blocks=8, kvcache_block_size=8, max_model_len=40)
    with LLM(EMBEDDED_MODEL, **options) as llm:
        outputs = llm.generate([[1] * 8, [2] * 8, [3] * 8], params, use_tqdm=False)
        counted = [output.metrics.num_preemptions for output in outputs]
        assert sum(counted) == llm.stats().num_preemptions > 0 == counted[0]


def worker_name(worker: Any, more: str) -> str:
    assert worker.get_model() is worker.model_runner.model
    return type(worker.model).__name__ + more


def test_a_function_is_called_with_every_worker(llm: LLM) -> None:
    assert llm.collective_rpc(worker_name, args=("!",)) == ["CausalLM!"]
    with pytest.raises(ValueError, match="workers have no method 'sleep': use LLM"):
        llm.collective_rpc("sleep")
    with pytest.raises(ValueError, match="timeout must be None, got 5"):
        llm.collective_rpc(worker_name, timeout=5)


@pytest.mark.parametrize(
    ("level", "shown"), [("info", True), ("ERROR", False), ("off", False), ("loud", False)]
)
def test_the_environment_sets_the_level_of_logs(level: str, shown: bool) -> None:
    script = "import nanovllm, logging; logging.getLogger('nanovllm.server').info('a message')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"NANOVLLM_LOG": level}, text=True,
        stderr=subprocess.PIPE, timeout=LIMIT,
    )  # fmt: skip
    if level == "loud":
        error = "NANOVLLM_LOG must be one of debug, info, warning, error, off, got 'loud'"
        assert done.returncode == 1 and error in done.stderr
    else:
        assert done.stderr == "nanovllm: a message\n" * shown


def test_options_are_in_the_signature() -> None:
    """For `help`, notebooks and type checkers; by name only, as calls take them."""
    shown = inspect.signature(LLM).parameters
    assert [*shown] == [field.name for field in dataclasses.fields(Config)]
    assert shown["model"].default is inspect.Parameter.empty
    assert {one.kind for name, one in shown.items() if name != "model"} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    with pytest.raises(TypeError, match="positional arguments"):
        LLM(EMBEDDED_MODEL, None)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("classify", "no model classifies; see LLM.score and LLM.encode"),
        ("reward", "no model rewards; LLM.encode has hidden states"),
        ("genrate", "did you mean 'generate'?"),
        ("get_world_size", "it is llm.config.tensor_parallel_size"),
        ("model_executor", "LLM.apply_model calls a function with each rank's model"),
    ],
)
def test_missing_methods_say_what_to_use(llm: LLM, name: str, hint: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}'.*") as caught:
        getattr(llm, name)
    assert str(caught.value).endswith(hint)


def test_missing_fields_of_outputs_say_what_to_use(llm: LLM) -> None:
    (output,) = llm.generate("1", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(AttributeError, match="outputs come in the order of the prompts"):
        _ = output.lora_request  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="times are durations in seconds: queue_time"):
        _ = output.metrics.arrival_time  # type: ignore[attr-defined]
    (event, *_) = llm.stream("1", SamplingParams(max_tokens=1))
    with pytest.raises(AttributeError, match="pass SamplingParams\\(output_kind="):
        _ = event.outputs  # type: ignore[attr-defined]


def test_names_of_vllm_can_be_imported_or_say_what_to_use() -> None:
    """All that `vllm/__init__.py` exports."""
    exported = [
        "LLM",
        "ModelRegistry",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
        "SamplingParams",
        "RequestOutput",
        "CompletionOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
        "LLMEngine",
        "EngineArgs",
        "AsyncLLMEngine",
        "AsyncEngineArgs",
        "initialize_ray_cluster",
        "PoolingParams",
    ]
    missing = [
        "ModelRegistry", "ClassificationOutput", "ClassificationRequestOutput",
        "initialize_ray_cluster",
    ]  # fmt: skip
    for name in exported:
        if name in missing:
            with pytest.raises(ImportError, match=f"^cannot import name '{name}' from 'nanovllm':"):
                getattr(nanovllm, name)
        else:
            assert getattr(nanovllm, name) is not None and name in nanovllm.__all__
    assert not hasattr(nanovllm, "anything_else")
    with pytest.raises(ImportError, match="use StructuredOutputs: docs/structured"):
        _ = importlib.import_module("nanovllm.sampling_params").GuidedDecodingParams


def test_classes_of_vllms_modules_are_found_or_explained() -> None:
    outputs = importlib.import_module("nanovllm.outputs")
    for kind in ("Pooling", "Embedding", "Scoring"):
        for name in (f"{kind}Output", f"{kind}RequestOutput"):
            assert getattr(outputs, name) is getattr(nanovllm, name)
    for module, name, words in (
        ("outputs", "ClassificationOutput", "no model classifies"),
        ("config", "VllmConfig", "see llm.config"),
        ("config", "CompilationConfig", "options are keywords of LLM"),
        ("config", "PoolerConfig", "are options of LLM.embed"),
    ):
        found = rf"^cannot import name '{name}' from 'nanovllm.{module}': .*{words}"
        with pytest.raises(ImportError, match=found):
            exec(f"from nanovllm.{module} import {name}")
    for module in ("config", "outputs", "sampling_params"):
        assert not hasattr(importlib.import_module(f"nanovllm.{module}"), "anything_else")
