"""EngineLoop, in this process: what it does between steps, and what in threads meanwhile."""

import pickle
import queue
import socket
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from reference import make_llm
from waiting import LIMIT

from nanovllm import LLM, SamplingParams
from nanovllm.engine.errors import EngineFullError, RankError
from nanovllm.engine.ranks.frames import receive
from nanovllm.engine.remote.loop import EngineLoop
from nanovllm.engine.remote.messages import (
    Ask,
    DropRequest,
    EngineAnswer,
    NewTokens,
    PromptProgress,
    Question,
    Quit,
    RequestEnd,
    RequestRefused,
    SubmitRequest,
)
from nanovllm.engine.remote.outbox import Outbox
from nanovllm.engine_main import answers_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = array("i", [1, 2]).tobytes()
PLAIN = SamplingParams(max_tokens=20, ignore_eos=True)
CONSTRAINED = SamplingParams(max_tokens=20, structured_outputs=dict(regex="[a-f]{3}"))


class Running:
    """A loop that runs in a thread, as its caller sees it."""

    def __init__(self, llm: LLM) -> None:
        self.ours, self._its = socket.socketpair()
        self.ours.settimeout(LIMIT)
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop = EngineLoop(llm, answers_of(llm), self.commands, Outbox(self._its))
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def until(self, last: type, number: int) -> list[Any]:
        """The events up to and with the one of this kind and number."""
        events: list[Any] = []
        while not any(isinstance(e, last) and e.number == number for e in events):
            events += receive(self.ours)
        return events

    def stats(self, number: int) -> tuple[list[Any], Any]:
        """What has come before the answer, and the statistics."""
        self.commands.put(Ask(number, "stats"))
        *before, answer = self.until(EngineAnswer, number)
        return before, pickle.loads(answer.value)

    def end(self) -> None:
        self.commands.put(Quit())
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        self.ours.close()
        self._its.close()


@pytest.fixture
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


def _numbers(events: list[Any]) -> set[int]:
    """The requests that events are of."""
    numbers = (e.numbers if isinstance(e, NewTokens) else [e.number] for e in events)
    return {number for some in numbers for number in some}


def test_log_probabilities_of_a_prompt_are_sent_with_each_step(model_dir: Path) -> None:
    """All of a long prompt's at once would hold both processes for as long as they are pickled."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    prompt = [1 + i % 9 for i in range(21)]
    with make_llm(model_dir, max_num_batched_tokens=8) as llm:
        running = Running(llm)
        running.commands.put(SubmitRequest(5, array("i", prompt).tobytes(), params))
        events = running.until(RequestEnd, 5)
        running.end()
        expected = llm.generate([prompt], params, use_tqdm=False)[0]["prompt_logprobs"]
    parts = [event.logprobs for event in events if isinstance(event, PromptProgress)]
    assert [len(part) for part in parts] == [8, 8, 4]
    sent = [[token_id for token_id, *_ in entry] for part in parts for entry in part]
    assert sent == [[token.token_id for token in entry] for entry in expected[1:]]


def test_constraints_compile_beside_the_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two constraints compile until they are let go; another request begins and ends meanwhile.

    One of the two was dropped by then, and is never queued.
    """
    let_go, compiling = threading.Event(), threading.Semaphore(0)
    accept = llm.intake.accept

    def slow(prompt: Any, params: SamplingParams, *_: Any) -> Any:
        if params.structured_outputs is not None:
            compiling.release()
            assert let_go.wait(LIMIT)
        return accept(prompt, params)

    monkeypatch.setattr(llm.intake, "accept", slow)
    running = Running(llm)
    try:
        for number in (0, 1):
            running.commands.put(SubmitRequest(number, PROMPT, CONSTRAINED))
            assert compiling.acquire(timeout=LIMIT)
        running.commands.put(SubmitRequest(2, PROMPT, PLAIN))
        assert _numbers(running.until(RequestEnd, 2)) == {2}
        running.commands.put(DropRequest(0))
        before, stats = running.stats(3)
        assert not before
        assert (stats.num_finished, stats.num_running, stats.num_waiting) == (1, 0, 0)
    finally:
        let_go.set()
    assert _numbers(running.until(RequestEnd, 1)) == {1}
    running.loop._compilers._compilers.shutdown()  # both have been compiled
    before, stats = running.stats(4)
    assert not before and (stats.num_finished, stats.num_aborted) == (2, 0)
    running.end()


def test_constraints_that_compile_long_stop_no_other_work(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All compilers are occupied, and a third constraint waits: after the limit both get errors.

    Bad words are read meanwhile, and a grammar that is compiled already needs no compiler.
    """
    llm.intake.accept([1], CONSTRAINED)
    let_go, compiling = threading.Event(), threading.Semaphore(0)
    kept: Any = llm.intake._extras._constraints
    compile_one = kept._compiled._compile_one

    def slow(asked: Any) -> Any:
        compiling.release()
        assert let_go.wait(LIMIT)
        return compile_one(asked)

    monkeypatch.setattr(kept._compiled, "_compile_one", slow)
    running = Running(llm)

    def submit(number: int, seconds: float, **params: Any) -> None:
        asked = SamplingParams(max_tokens=2, ignore_eos=True, **params)
        running.commands.put(SubmitRequest(number, PROMPT, asked, grammar_seconds=seconds))

    try:
        for number, seconds in ((0, LIMIT), (1, 0.3)):
            submit(number, seconds, structured_outputs=dict(regex=f"[a-f]{{{number + 4}}}"))
            assert compiling.acquire(timeout=LIMIT)
        submit(2, 0.1, structured_outputs=dict(regex="[a-f]{9}"))
        submit(3, LIMIT, bad_words=["a"])
        submit(4, LIMIT, structured_outputs=CONSTRAINED.structured_outputs)
        events = list[Any]()
        while (
            len(refused := [e for e in events if isinstance(e, RequestRefused)]) < 2
            or len(ended := [e.number for e in events if isinstance(e, RequestEnd)]) < 2
        ):
            events += receive(running.ours)
    finally:
        let_go.set()
    errors = {e.number: e.error for e in refused}  # on a busy machine both come at once
    assert sorted(ended) == [3, 4] and errors.keys() == {1, 2}
    waited, compiled = errors[2], errors[1]
    assert isinstance(waited, EngineFullError) and isinstance(compiled, ValueError)
    assert "for 0.1 seconds (grammar_seconds); try again later" in str(waited)
    assert "take longer than 0.3 seconds (grammar_seconds) to compile" in str(compiled)
    running.loop._compilers._compilers.shutdown()  # all have been compiled
    assert _numbers(running.until(RequestEnd, 0)) == {0}
    assert running.stats(6)[1].num_finished == 3
    running.end()


def test_a_rank_that_ends_beside_the_steps_ends_the_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        raise RankError("rank 1 was killed")

    ours, its = socket.socketpair()
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with ours, its, monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "check", check)
        patch.setattr(llm, "stats", check)
        commands.put(Ask(1, "stats", between_steps=False))
        end = threading.Timer(LIMIT, commands.put, [Quit()])
        end.daemon = True
        end.start()
        with pytest.raises(RankError, match="rank 1 was killed"):
            EngineLoop(llm, answers_of(llm), commands, Outbox(its)).run()


def test_every_question_has_an_answer(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        assert answers_of(llm).keys() == set(get_args(Question))
