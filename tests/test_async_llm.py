"""AsyncLLM: the answers of LLM for many callers, who come, go, stop and fail as they like."""

import asyncio
import gc
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import zygote
from reference import make_llm, make_prompts
from waiting import LIMIT, wait_until

from nanovllm import LLM, RankError, SamplingParams
from nanovllm.async_llm import AsyncLLM
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.errors import EngineFullError, NotReadyError
from nanovllm.engine.remote import request_copy
from nanovllm.engine.remote.readers import LARGE, MESSAGE, PROMPT, SMALL, all_size, prompt_size
from nanovllm.engine.requests import extras
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine_main import read_vocabulary
from nanovllm.vectors import plans

pytestmark = pytest.mark.usefixtures("one_thread")

T = TypeVar("T")
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.05)
LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


Run = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def run(loop: asyncio.AbstractEventLoop) -> Run[Any]:
    return lambda awaitable: loop.run_until_complete(asyncio.wait_for(awaitable, LIMIT))


@pytest.fixture(scope="module")
def engine(model_dir: Path, run: Run[Any]) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(model_dir, max_num_seqs=8, **OPTIONS)
    yield engine
    engine.close()
    run(asyncio.sleep(0))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make_llm(model_dir, max_num_seqs=8)


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the engine nothing runs there, and no call is left."""
    yield
    if "engine" in request.fixturenames:
        engine, run = request.getfixturevalue("engine"), request.getfixturevalue("run")
        stats = None

        def is_idle() -> bool:
            nonlocal stats
            stats = run(engine.stats())
            return not stats.num_running + stats.num_waiting

        wait_until("requests go on", is_idle)
        assert stats is not None
        assert (
            stats.blocks_used == 0 and engine.num_open == 0 and not engine.open_requests.by_number
        )


async def until_begun(engine: AsyncLLM) -> None:
    """Wait until the engine has a request."""
    while not (stats := await engine.stats()).num_running + stats.num_waiting:
        await asyncio.sleep(0.001)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with parameters of every kind, each with a seed of its own."""
    kinds: list[dict[str, Any]] = [
        {}, dict(n=3), dict(logprobs=2), dict(prompt_logprobs=1, logprobs=0), dict(stop=["a", "é"]),
        dict(stop="b", min_tokens=5, include_stop_str_in_output=True, n=2), dict(max_tokens=1),
        dict(structured_outputs=dict(regex="[a-f]{3,9}")), dict(presence_penalty=1.5, stop=["zz"]),
        dict(structured_outputs=dict(choice=["abc", "abd"]), stop=["c"], logprobs=1),
        dict(stop_token_ids=list(range(40)), priority=3), dict(bad_words=["a"], ignore_eos=True),
        dict(stop=[chr(c) for c in range(97, 110)], logprobs=1, ignore_eos=True),
    ]  # fmt: skip
    prompts = make_prompts()
    return [
        (
            prompts[index % len(prompts)],
            SamplingParams(**{"temperature": 1.2, "max_tokens": 25, "seed": index, **kind}),
        )
        for index, kind in enumerate(kinds * 3)
    ]


def told(output: Any) -> Any:
    """What an output says, but for its times and its request's number."""
    left_out = ("metrics", "request_id", "num_cached_tokens")
    return {name: value for name, value in output.items() if name not in left_out}


async def joined(events: Any) -> list[tuple[str, list[int], Any, Any, Any]]:
    """Text, tokens, reasons and log-probabilities of the samples of a stream."""
    samples: dict[int, Any] = {}
    async for event in events:
        text, tokens, likely, _, _ = samples.get(event.sample, ("", [], [], None, None))
        likely = None if event.logprobs is None else likely + event.logprobs
        samples[event.sample] = (
            text + event.text, tokens + event.token_ids, likely, event.finish_reason,
            event.stop_reason,
        )  # fmt: skip
    return [samples[index] for index in sorted(samples)]


def test_large_prompts_do_not_hold_up_others(
    engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three are being read, one after the other, while a small one is answered."""
    let_go, accept = threading.Event(), engine.intake.accept

    def slow(prompt: Any, params: SamplingParams) -> Any:
        if len(prompt) >= LARGE:
            assert let_go.wait(LIMIT)
            raise ValueError("it is too long")
        return accept(prompt, params)

    monkeypatch.setattr(engine.intake, "accept", slow)

    async def ask() -> None:
        large = [asyncio.ensure_future(engine.complete("1" * LARGE)) for _ in range(3)]
        try:
            await engine.complete("1+1=")
            assert not any(task.done() for task in large)
        finally:
            let_go.set()
        for task in large:
            with pytest.raises(ValueError, match="too long"):
                await task

    run(ask())


@pytest.mark.parametrize(
    ("prompt", "number"),
    [("abc", 3), ({"prompt": "abc"}, 3), ([1, 2], 2), ({"prompt_token_ids": [1]}, 1), (None, 0),
     ([{"role": "user", "content": "abc"}, {"content": [{"type": "text", "text": "de"}]}],
      5 + 3 * MESSAGE),
     ([{"role": "assistant", "tool_calls": [{"x": 1}]}], MESSAGE + SMALL),
     ([{"role": "assistant", "reasoning_content": "abc"}], 3 + MESSAGE)],
)  # fmt: skip
def test_sizes_of_prompts_and_conversations(prompt: Any, number: int) -> None:
    assert prompt_size(prompt) == number


def test_a_size_is_no_sum_of_more_than_makes_a_difference() -> None:
    """The event loop adds the sizes, however many messages or prompts there are."""

    class Added(dict[str, str]):
        number = 0

        def get(self, *names: Any) -> Any:
            Added.number += 1
            return super().get(*names)

    messages = [Added(content="a")] * 100_000
    assert prompt_size(messages) >= LARGE and Added.number <= 6 * (LARGE // MESSAGE + 1)
    Added.number = 0
    assert all_size(messages) >= LARGE and Added.number <= 6 * (LARGE // PROMPT + 1)


def test_a_constraint_is_taken_out_of_parameters_beside_the_event_loop(
    engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks all parameters again, and a bias for each token takes long."""
    threads: list[threading.Thread] = []
    checked = SamplingParams.__post_init__

    def check(params: SamplingParams) -> None:
        threads.append(threading.current_thread())
        checked(params)

    params = SamplingParams(
        max_tokens=1, structured_outputs={"regex": "[0-9]"}, allowed_token_ids=[*range(50)] * 50
    )
    monkeypatch.setattr(SamplingParams, "__post_init__", check)
    run(engine.complete("1+1=", params))
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.score("a" * 200, ["b"] * 12),
        lambda engine: engine.score(["a" * 450] * 3, ["b", "c", "d"]),
        lambda engine: engine.embed(["a"] * 300),
        lambda engine: engine.complete("a", SamplingParams(stop=[str(i) for i in range(SMALL)])),
    ],
)
def test_what_takes_long_is_read_beside_the_event_loop(
    call: Any, engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no prompt is long."""
    threads, accept = set(), engine.intake.accept

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return accept(*args)

    monkeypatch.setattr(engine.intake, "accept", noted)
    run(call(engine))
    assert threads and threading.current_thread() not in threads


def test_bad_words_are_tokenized_by_the_engines_process_alone(
    engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of 20,000 would hold up the event loop. The engine refuses what does not fit."""
    monkeypatch.setattr(extras, "BadWords", None)
    output = run(engine.complete("a", SamplingParams(max_tokens=5, bad_words=["b"])))
    assert output.token_ids
    params = SamplingParams(allowed_token_ids=[64], bad_words=["a"])
    with pytest.raises(ValueError, match="allowed_token_ids must hold more than bad_words"):
        run(engine.complete("a", params))


def test_steps_are_fair_where_callers_wait_for_tokens(engine: AsyncLLM, llm: LLM) -> None:
    """And best for throughput where all outputs are returned together."""
    assert (engine.config.scheduling, llm.config.scheduling) == ("fair", "prefill-first")


def test_outputs_equal_those_of_generate(engine: AsyncLLM, llm: LLM, run: Run[Any]) -> None:
    asked = requests()
    prompts, params = [prompt for prompt, _ in asked], [params for _, params in asked]
    expected = llm.generate(prompts, params, use_tqdm=False)

    async def everything() -> Any:
        return await asyncio.gather(*(engine.complete(*one) for one in asked))

    for found, wanted in zip(run(everything()), expected, strict=True):
        assert told(found) == told(wanted)


def test_streams_join_to_outputs_while_others_leave(
    engine: AsyncLLM, llm: LLM, run: Run[Any]
) -> None:
    """64 callers, of whom half leave after some events, or are cancelled."""
    asked = (requests() * 2)[:64]
    rng = random.Random(7)
    leaving = {index: rng.randrange(1, 20) for index in range(64) if rng.random() < 0.5}

    async def leave(one: Any, events_left: int) -> None:
        stream = engine.generate(*one)
        async for _ in stream:
            events_left -= 1
            if not events_left:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def cancel(one: Any, number: int) -> None:
        task = asyncio.create_task(joined(engine.generate(*one)))
        await asyncio.sleep(number / 200)
        task.cancel()

    async def everything() -> Any:
        tasks = [
            joined(engine.generate(*one))
            if index not in leaving
            else (leave if index % 2 else cancel)(one, leaving[index])
            for index, one in enumerate(asked)
        ]
        return await asyncio.gather(*tasks)

    results = run(everything())
    stay = [index for index in range(64) if index not in leaving]
    expected = llm.generate(
        [asked[i][0] for i in stay], [asked[i][1] for i in stay], use_tqdm=False
    )
    for index, output in zip(stay, expected, strict=True):
        wanted = [
            (s.text, s.token_ids, s["logprobs"], s.finish_reason, s.stop_reason)
            for s in output.outputs
        ]
        assert results[index] == wanted


def test_a_slow_caller_gets_several_tokens_at_once(engine: AsyncLLM, run: Run[Any]) -> None:
    async def slow() -> list[int]:
        sizes = []
        async for event in engine.generate([1, 2], LONG):
            sizes.append(len(event.token_ids))
            await asyncio.sleep(0.05)
        return sizes

    sizes = run(slow())
    assert sum(sizes) == 400 and max(sizes) > 1


def test_a_caller_that_does_not_read_delays_nobody(engine: AsyncLLM, run: Run[Any]) -> None:
    """Nor itself: all of its tokens come meanwhile, and wait for it in one event."""

    async def everything() -> Any:
        stream = engine.generate([1, 2], LONG)
        first = await anext(stream)  # and nothing more
        others = await asyncio.gather(*(engine.complete([3], LONG) for _ in range(3)))
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        return first, others, [event async for event in stream]

    first, others, rest = run(everything())
    assert [len(other.token_ids) for other in others] == [400] * 3
    assert [len(event.token_ids) for event in rest] == [400 - len(first.token_ids)]


def test_chats_have_deltas_and_constraints(engine: AsyncLLM, run: Run[Any]) -> None:
    start = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = f"{start}{{{{ tools }}}}<tool_call><think></think>"
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def chat() -> Any:
        params = SamplingParams(max_tokens=200, seed=1)
        stream = engine.chat(
            [{"role": "user", "content": "Hi"}], params,
            tools=tools, tool_choice="required", parallel_tool_calls=False,
                chat_template=template,
        )  # fmt: skip
        return [event.delta async for event in stream]

    calls = [call for delta in run(chat()) for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"


def test_abort_ends_a_stream(engine: AsyncLLM, run: Run[Any]) -> None:
    async def aborted() -> Any:
        reasons = []
        async for event in engine.generate([1], LONG, request_id="mine"):
            assert event.request_id == "mine"
            reasons.append(event.finish_reason)
            if len(reasons) == 3:
                with pytest.raises(ValueError, match="request_id 'mine' is that of another"):
                    await engine.complete([1], LONG, request_id="mine")
                await engine.abort("mine")
        with pytest.raises(ValueError, match="request_id must be that of a request, got 'mine'"):
            await engine.abort("mine")
        return reasons

    reasons = run(aborted())
    assert reasons[-1] == "abort" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], None, ValueError, "prompt must have 1 to"),
        ([10**6], None, ValueError, "prompt token id must be in"),
        (5, None, TypeError, "prompt"),
        ([1], 5, TypeError, "sampling_params must be a SamplingParams, got 5"),
        ([1], SamplingParams(logprobs=10**6), ValueError, "logprobs must be in"),
        ([1], SamplingParams(structured_outputs=dict(regex="(")), ValueError, "structured_outputs"),
    ],
)
def test_bad_requests_raise(
    engine: AsyncLLM, run: Run[Any], prompt: Any, params: Any, error: Any, words: str
) -> None:
    """The last one is found by the engine's process."""
    with pytest.raises(error, match=words):
        run(engine.complete(prompt, params))
    with pytest.raises(error, match=words):
        run(joined(engine.generate(prompt, params)))


def test_too_many_callers_are_refused(model_dir: Path, run: Run[Any]) -> None:
    async def crowd() -> Any:
        async with AsyncLLM(model_dir, max_num_seqs=2, max_waiting=3, **OPTIONS) as engine:
            calls = [engine.complete([1], LONG) for _ in range(9)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            again = await engine.complete([1], LONG)
            return results, again

    results, again = run(crowd())
    refused = [one for one in results if isinstance(one, EngineFullError)]
    assert len(refused) == 4 and "at most 5 may (max_num_seqs=2, max_waiting=3)" in str(refused[0])
    assert all(told(one) == told(again) for one in results if not isinstance(one, Exception))


def test_vectors_that_have_begun_are_not_refused(model_dir: Path, run: Run[Any]) -> None:
    """Others fill the room meanwhile."""

    async def crowd() -> tuple[int, set[type]]:
        options = dict(OPTIONS, max_num_seqs=2, max_waiting=2, scheduling="mixed")
        async with AsyncLLM(model_dir, **options) as engine:
            assert engine.config.scheduling == "mixed", "what is asked for"
            vectors = asyncio.ensure_future(engine.embed([[1, i] for i in range(60)]))
            results = set()
            while not vectors.done():
                calls = [engine.complete([1], LONG) for _ in range(5)]
                found = await asyncio.gather(*calls, return_exceptions=True)
                results |= {type(one) for one in found}
            assert engine.num_open == 0
            return len(await vectors), results

    number, results = run(crowd())
    assert number == 60 and EngineFullError in results


def test_an_error_in_one_calls_text_ends_that_call(
    engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = request_copy._stop

    def raising(seq: Sequence) -> Any:
        if "never" in (seq.params.stop or ()):
            raise IndexError("this piece is unknown")
        return follow(seq)

    monkeypatch.setattr(request_copy, "_stop", raising)

    async def ask() -> Any:
        params = [
            SamplingParams(temperature=0, max_tokens=9, stop=stop)
            for stop in ("never", "no", "never")
        ]
        whole = [engine.complete("12+34=", one) for one in params[:2]]
        results = await asyncio.gather(*whole, return_exceptions=True)
        with pytest.raises(IndexError, match="this piece is unknown"):
            async for _ in engine.generate("12+34=", params[2]):
                pass
        assert engine.num_open == 0
        return results

    error, output = run(ask())
    assert isinstance(error, IndexError) and output.finish_reason is not None


def test_an_engine_is_closed_after_its_event_loop() -> None:
    engine, loop = AsyncLLM(EMBEDDED_MODEL, **OPTIONS), asyncio.new_event_loop()

    async def leave() -> Any:
        await engine.stats()
        waiting = loop.create_task(engine.wait_for_failure())
        await asyncio.sleep(0)
        return waiting

    waiting = loop.run_until_complete(leave())
    loop.close()
    engine.close()
    assert not waiting.done()
    for task in (waiting, engine.connection._listening):
        task._log_destroy_pending = False


def test_a_killed_engine_is_an_error_of_every_call(model_dir: Path, run: Run[Any]) -> None:
    async def killed() -> Any:
        engine = AsyncLLM(model_dir, max_num_seqs=2, **OPTIONS)
        calls = [asyncio.create_task(engine.complete([1], LONG)) for _ in range(5)]
        stats = asyncio.create_task(engine.stats())
        await until_begun(engine)
        os.kill(engine.connection.process.pid, signal.SIGKILL)
        results = await asyncio.gather(*calls, stats, return_exceptions=True)
        with pytest.raises(RankError, match="killed by SIGKILL"):
            engine.check()
        with pytest.raises(RankError, match="killed by SIGKILL"):
            await engine.complete([1])
        engine.close()
        return results

    *results, _ = run(killed())
    assert all(isinstance(one, RankError) for one in results)


def test_an_engine_that_hangs_does_not_answer_a_ping(
    engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later callers wait for the same question, whose time has passed, and so not at all."""
    waits, wait_for = [], asyncio.wait_for

    async def noted(awaitable: Any, timeout: float) -> Any:
        waits.append(timeout)
        return await wait_for(awaitable, timeout)

    async def hang() -> None:
        await engine.ping(LIMIT)
        os.kill(engine.connection.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(asyncio, "wait_for", noted)
        try:
            for _ in range(2):
                pings = (engine.ping(0.1) for _ in range(3))
                errors = await asyncio.gather(*pings, return_exceptions=True)
                assert all(isinstance(error, asyncio.TimeoutError) for error in errors)
            assert len(engine.connection._questions) == 1
        finally:
            os.kill(engine.connection.process.pid, signal.SIGCONT)
        await engine.ping(LIMIT)
        assert not engine.connection._questions

    run(hang())
    assert waits[0] <= 0.1 and waits[3:6] == [0.0] * 3


def test_a_ping_of_a_dead_engine_raises_why_it_ended(model_dir: Path, run: Run[Any]) -> None:
    async def die() -> None:
        async with AsyncLLM(model_dir, **OPTIONS) as engine:
            await engine.ping(LIMIT)
            os.kill(engine.connection.process.pid, signal.SIGSTOP)
            ping = asyncio.create_task(engine.ping(LIMIT))
            while not engine.connection._questions:
                await asyncio.sleep(0)
            os.kill(engine.connection.process.pid, signal.SIGKILL)
            for waiting in (ping, engine.ping(LIMIT)):
                with pytest.raises(RankError, match="killed by SIGKILL"):
                    await waiting

    run(die())


def test_a_killed_rank_is_an_error_of_every_call(model_dir: Path, run: Run[Any]) -> None:
    async def killed() -> Any:
        engine = AsyncLLM(model_dir, tensor_parallel_size=2, **OPTIONS)
        call = asyncio.create_task(engine.complete([1], LONG))
        await until_begun(engine)
        (worker,) = zygote.children(engine.connection.process.pid)
        os.kill(worker, signal.SIGKILL)
        (result,) = await asyncio.gather(call, return_exceptions=True)
        engine.close()
        return result

    result = run(killed())
    assert isinstance(result, RankError) and "rank 1 of 2 was killed by SIGKILL" in str(result)


def test_errors_of_starting_keep_their_types(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be >= 1, got 0"):
        AsyncLLM(model_dir, max_num_seqs=0)
    with pytest.raises(TypeError, match="unknown option 'max_seqs'"):
        AsyncLLM(model_dir, max_seqs=1)
    with pytest.raises(OSError, match="nope"):
        AsyncLLM(tmp_path / "nope")
    with pytest.raises(ValueError, match="max_model_len"):
        AsyncLLM(model_dir, max_model_len=10**6, **OPTIONS)


def test_close_ends_waiting_calls_and_the_process(run: Run[Any]) -> None:
    async def closed() -> Any:
        engine = AsyncLLM(EMBEDDED_MODEL, device="cpu")
        pid = engine.connection.process.pid
        call = asyncio.create_task(engine.complete("1+1=", LONG))
        await until_begun(engine)
        async with engine:
            pass
        engine.close()
        (result,) = await asyncio.gather(call, return_exceptions=True)
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed; make a new one"):
            await engine.stats()
        return pid, result

    pid, result = run(closed())
    assert isinstance(result, RuntimeError) and "is closed" in str(result)
    assert not Path(f"/proc/{pid}").exists()


def test_a_debugging_loop_closes_it(model_dir: Path) -> None:
    """It checks that tasks are cancelled in the loop's own thread."""

    async def main() -> int:
        async with AsyncLLM(model_dir, **OPTIONS) as engine:
            await engine.complete([1], SamplingParams(max_tokens=2))
            return engine.connection.process.pid

    pid = asyncio.run(main(), debug=True)
    assert not Path(f"/proc/{pid}").exists()


def test_one_after_another_in_a_loop(model_dir: Path) -> None:
    """The second one's socket gets the number of the first one's."""

    async def main() -> None:
        for _ in range(3):
            engine = AsyncLLM(model_dir, **OPTIONS)
            await asyncio.wait_for(engine.complete([1], SamplingParams(max_tokens=2)), LIMIT)
            engine.close()

    asyncio.run(main())


def test_a_forked_process_leaves_the_engine_alone(model_dir: Path, run: Run[Any]) -> None:
    async def fork() -> None:
        async with AsyncLLM(model_dir, **OPTIONS) as engine:
            child = os.fork()
            if child == 0:
                engine.connection.process.close()
                os._exit(0)
            os.waitpid(child, 0)
            await engine.complete([1], SamplingParams(max_tokens=2))

    run(fork())


def test_errors_reach_those_who_come_late(engine: AsyncLLM, run: Run[Any]) -> None:
    async def late() -> None:
        params = SamplingParams(structured_outputs=dict(regex="("))
        async with engine.request([1], params) as call:
            while not call.is_over:
                await asyncio.sleep(0.01)
            with pytest.raises(ValueError, match="structured_outputs"):
                await call.output()

    run(late())


def test_open_samples_are_those_that_have_not_ended(engine: AsyncLLM, run: Run[Any]) -> None:
    """They are counted as samples begin and end, and not again for each new request."""
    seen = set()

    async def watch(prompt: Any, params: SamplingParams, leaves: bool) -> None:
        async for _ in engine.generate(prompt, params):
            calls = engine.open_requests.by_number.values()
            assert engine.num_open == sum(len(c.copy.request.unfinished) for c in calls)
            seen.add(engine.num_open)
            if leaves:
                return

    async def everything() -> None:
        asked = requests()
        await asyncio.gather(*(watch(*one, index % 3 == 0) for index, one in enumerate(asked)))

    run(everything())
    assert len(seen) > 10 and engine.num_open == 0


def test_more_samples_than_there_is_room_for(engine: AsyncLLM, run: Run[Any]) -> None:
    with pytest.raises(ValueError, match="n must be at most 1032"):
        run(engine.complete([1], SamplingParams(n=1033)))


def test_a_collected_engine_leaves_no_process(model_dir: Path) -> None:
    engine = AsyncLLM(model_dir, **OPTIONS)
    pid = engine.connection.process.pid
    del engine
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_another_event_loop_is_refused(engine: AsyncLLM, run: Run[Any]) -> None:
    run(engine.stats())
    with pytest.raises(RuntimeError, match="an AsyncLLM serves one event loop"):
        asyncio.run(engine.stats())


def test_metrics_count_stops_as_stops(engine: AsyncLLM, run: Run[Any]) -> None:
    """Stop strings are found outside of the engine's process."""

    def stops() -> int:
        metrics = {
            (one.name, one.labels.get("finished_reason")): one for one in run(engine.get_metrics())
        }
        return int(metrics["vllm:request_success", "stop"].value)

    before = stops()
    letters = [chr(c) for c in range(33, 127)]
    params = SamplingParams(stop=letters, max_tokens=400, ignore_eos=True, temperature=2.0, seed=0)
    assert run(engine.complete([1], params)).finish_reason == "stop"
    wait_until("the stop is not counted", lambda: stops() > before)


def test_the_vocabulary_is_read_before_the_first_request(model_dir: Path, tmp_path: Path) -> None:
    """Reading it stops all threads of a process, for a second with a large one."""
    constrained = SamplingParams(structured_outputs=dict(regex="b"))
    with make_llm(model_dir) as llm:
        read_vocabulary(llm)
        with patch("llguidance.LLTokenizer", side_effect=AssertionError("it is read again")):
            llm.intake.accept([5], constrained)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    with make_llm(tmp_path) as llm:
        read_vocabulary(llm)  # there is none


def test_vectors_are_those_of_llm(engine: AsyncLLM, llm: LLM, run: Run[Any]) -> None:
    """Of more prompts than may run at once, beside requests that generate."""
    prompts = [[i % 256, 5, 9, *range(i)] for i in range(40)]

    async def all_at_once() -> Any:
        return await asyncio.gather(
            engine.embed(prompts, dimensions=9), engine.encode(prompts, "all"),
            engine.encode(prompts[7], "mean"), engine.score("a", ["b", "a"]),
            engine.complete(prompts[3], LONG),
        )  # fmt: skip

    embedded, encoded, means, scored, completed = run(all_at_once())
    want = llm.embed(prompts, dimensions=9, use_tqdm=False)
    for mine, theirs in zip(embedded, want, strict=True):
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        assert mine.embedding == pytest.approx(theirs.embedding, abs=1e-5)
        assert mine.outputs.embedding is mine.embedding and mine.metrics.end_to_end_time > 0
    for mine, theirs in zip(encoded, llm.encode(prompts, "all", use_tqdm=False), strict=True):
        assert (mine.outputs.data - theirs.outputs.data).abs().max() < 1e-5
    (mean,) = means
    assert (mean.outputs.data - encoded[7].outputs.data.mean(0)).abs().max() < 1e-5
    assert [s.score for s in scored] == pytest.approx(
        [s.score for s in llm.score("a", ["b", "a"], use_tqdm=False)], abs=1e-5
    )
    assert completed.token_ids == llm.generate(prompts[3], LONG, use_tqdm=False)[0].token_ids


def test_vectors_of_many_prompts_take_few_tasks(model_dir: Path, run: Run[Any]) -> None:
    """One for each place in the queue, not for each prompt."""

    async def most_tasks() -> int:
        async with AsyncLLM(model_dir, max_num_seqs=2, max_waiting=2, **OPTIONS) as engine:
            vectors = asyncio.ensure_future(engine.embed([[1, i] for i in range(60)]))
            most = 0
            while not vectors.done():
                most = max(most, len(asyncio.all_tasks()))
                await asyncio.sleep(0)
            assert len(await vectors) == 60
            return most

    assert 4 < run(most_tasks()) < 12


@pytest.mark.parametrize(("number", "is_beside"), [(300, True), (2, False)])
def test_many_vectors_are_written_beside_the_event_loop(
    number: int, is_beside: bool, engine: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand lists of a thousand numbers take tens of milliseconds."""
    threads, common_fields = set(), plans.common_fields

    def noted(request: Any) -> Any:
        threads.add(threading.current_thread())
        return common_fields(request)

    monkeypatch.setattr(plans, "common_fields", noted)
    assert len(run(engine.embed(["a"] * number))) == number
    assert (threading.current_thread() not in threads) == is_beside and len(threads) == 1


def test_bad_vector_calls_queue_nothing(engine: AsyncLLM, run: Run[Any]) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt must have 1 to"):
        run(engine.embed(["a", ""]))
    with pytest.raises(ValueError, match="dimensions must be in"):
        run(engine.embed("a", dimensions=0))
    with pytest.raises(TypeError, match="dimension"):
        run(engine.embed("a", dimension=1))
    assert engine.num_open == 0


def test_cancelled_vectors_end_in_the_engine(engine: AsyncLLM, run: Run[Any]) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(engine.embed([[1] * 400] * 300))
        await until_begun(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())


def test_aborted_vectors_raise(engine: AsyncLLM, run: Run[Any]) -> None:
    async def aborted() -> None:
        task = asyncio.ensure_future(engine.encode([[1] * 400] * 8, "mean"))
        while not engine.open_requests.by_number:
            await asyncio.sleep(0)
        await engine.abort(next(iter(engine.open_requests.by_number.values())).name)
        with pytest.raises(NotReadyError, match="a request was aborted before"):
            await task

    run(aborted())


def test_an_aborted_prompt_ends_the_others_of_its_call(engine: AsyncLLM, run: Run[Any]) -> None:
    async def finished() -> int:
        before = (await engine.stats()).num_finished
        task = asyncio.ensure_future(engine.encode([[1] * 400] * 300, "mean"))
        while not engine.open_requests.by_number:
            await asyncio.sleep(0)
        await engine.abort(next(iter(engine.open_requests.by_number.values())).name)
        with pytest.raises(NotReadyError, match="a request was aborted before"):
            await task
        assert engine.num_open == 0
        return (await engine.stats()).num_finished - before

    assert run(finished()) < 200
