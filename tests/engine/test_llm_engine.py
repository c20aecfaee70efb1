"""LLMEngine and processes: an engine belongs to the process that made it, and is not copied."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=8)
REFUSAL = (
    "an LLM cannot be used in a process forked from the one that made it; start that process with"
    ' multiprocessing\'s "spawn" method, and make an LLM in it'
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EMBEDDED_MODEL, device="cpu", num_kvcache_blocks=64, max_model_len=64) as llm:
        yield llm


def solve(llm: LLM) -> str:
    (out,) = llm.generate("12+34=", GREEDY, use_tqdm=False)
    return out["text"]


def in_child(act: Callable[[], object]) -> str:
    """What `act` returns or raises in a forked process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12, beside threads
        child = os.fork()
    if not child:
        try:
            report = str(act())
        except BaseException as error:
            report = f"{type(error).__name__}: {error}"
        os.write(writer, report.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        report = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return report


CALLS: dict[str, Callable[[LLM, int], object]] = {
    "generate": lambda llm, _: llm.generate("1+1=", GREEDY, use_tqdm=False),
    "chat": lambda llm, _: llm.chat([{"role": "user", "content": "1+1="}], GREEDY),
    "stream": lambda llm, _: llm.stream("1+1=", GREEDY),
    "add_request": lambda llm, _: llm.add_request("1+1=", GREEDY),
    "step": lambda llm, _: llm.step(),
    "abort_request": lambda llm, request_id: llm.abort_request(request_id),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_cannot_use_an_engine(llm: LLM, name: str) -> None:
    """In place of a deadlock in OpenMP or an error of CUDA. The parent goes on."""
    request_id = llm.add_request("7+8=", GREEDY)
    assert in_child(lambda: CALLS[name](llm, request_id)) == f"RuntimeError: {REFUSAL}"
    while not (outputs := llm.step()):
        pass
    assert [out["text"] for out in outputs] == ["15"]
    assert solve(llm) == "46"


def test_a_forked_process_cannot_go_on_with_a_stream(llm: LLM) -> None:
    """And dropping the child's copy of the iterator aborts nothing in the parent."""
    events = llm.stream("12+34=", GREEDY)
    texts = [next(events)["text"]]
    assert in_child(lambda: next(events)) == f"RuntimeError: {REFUSAL}"
    assert in_child(lambda: events.close()) == "None"  # type: ignore[attr-defined]
    assert "".join(texts + [event["text"] for event in events]) == "46"


def test_a_forked_process_may_read_and_close_its_copy(llm: LLM) -> None:
    """Closing it changes nothing in the parent, nor on the device."""
    stats = llm.stats()
    assert in_child(llm.stats) == str(stats)
    assert in_child(lambda: repr(llm)) == repr(llm)

    def close() -> str:
        closed: list[int] = []
        llm.model_runner.shard.close = lambda *_, **__: closed.append(1)  # type: ignore[method-assign]
        llm.close()
        llm.close()
        return f"{closed} {solve(llm)}"

    assert in_child(close) == f"RuntimeError: {REFUSAL}"
    assert solve(llm) == "46"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forked_process_that_ends_does_not_disturb_the_engine(num_ranks: int) -> None:
    """It ends in each way that there is: by itself, by sys.exit, by os._exit, and by an error."""
    code = f"""
import gc, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
llm = LLM(EMBEDDED_MODEL, device="cpu", num_kvcache_blocks=64, tensor_parallel_size={num_ranks})
def solve():
    params = SamplingParams(temperature=0, max_tokens=8)
    print(llm.generate("12+34=", params, use_tqdm=False)[0]["text"], flush=True)
def drop():
    global llm
    del llm
    gc.collect()
def use():
    with llm:
        solve()
solve()
for end in (lambda: sys.exit(3), lambda: os._exit(4), drop, use):
    if (child := os.fork()) == 0:
        end()
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    solve()
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, cwd=root,
        env=environment,
    )  # fmt: skip
    assert done.stdout.split() == ["46", "3", "46", "4", "46", "5", "46", "1", "46"], done.stderr
    assert done.stderr.endswith(f"RuntimeError: {REFUSAL}\n")
    assert done.stderr.count("Traceback") == 1 and done.returncode == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", [LLM, LLMEngine])
def test_an_engine_cannot_be_copied_or_pickled(
    llm: LLM, kind: type[LLMEngine], duplicate: Callable[[object], object]
) -> None:
    """A copy would free the same memory, and a process that unpickles has neither device nor KV."""
    engine = llm if kind is LLM else object.__new__(kind)
    message = "an LLM cannot be copied or pickled.*pass the model's name and the options, and make"
    with pytest.raises(TypeError, match=message):
        duplicate(engine)
    assert solve(llm) == "46"


@pytest.mark.parametrize("options", [
    dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}),
    dict(enable_lora=True), dict(enable_sleep_mode=True),
])  # fmt: skip
def test_the_engine_alone_refuses_options_of_features(options: dict[str, Any]) -> None:
    """They would have no effect."""
    with pytest.raises(
        ValueError, match=f"{next(iter(options))} is not available in an LLMEngine alone"
    ):
        LLMEngine(EMBEDDED_MODEL, device="cpu", num_kvcache_blocks=64, **options)


def test_the_engine_alone_computes_requests(llm: LLM) -> None:
    engine = LLMEngine(EMBEDDED_MODEL, device="cpu", num_kvcache_blocks=64, max_model_len=64)
    engine.add_request("12+34=", GREEDY)
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    engine.close()
    assert [output.text for output in outputs] == [solve(llm)]
