"""`nanovllm run-batch` in separate processes, which are killed.

A server forks them after importing PyTorch, so that they are not killed while importing.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT, wait_until

from nanovllm.command.main import main
from nanovllm.embedded.problems import sample_problems

NUM_REQUESTS = int(os.environ.get("NANOVLLM_KILL_REQUESTS", "300"))
NUM_KILLS = int(os.environ.get("NANOVLLM_KILLS", "10"))
# Few sequences, so that a job runs long enough to be killed; float32, so that all batches round
# the same.
OPTIONS = ["--max-num-seqs", "8", "--max-model-len", "64", "--dtype", "float32", "--device", "cpu"]

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["nanovllm.batch.job", "transformers"])


def work(argv: list[str], log: Path) -> None:
    """Run the command in this process, with its output in `log`."""
    multiprocessing.set_start_method("fork", force=True)  # as in a process that a shell has started
    os.environ["OMP_NUM_THREADS"] = "1"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    sys.exit(main(argv))


class Runs:
    """Starts the command; `log` has the output of all runs."""

    def __init__(self, path: Path) -> None:
        self.input, self.output, self.log = path / "in.jsonl", path / "out.jsonl", path / "log"

    def start(self, *options: str, output: Path | None = None) -> Any:
        target = str(output or self.output)
        argv = ["run-batch", str(self.input), "-o", target, *OPTIONS, *options]
        process = forkserver.Process(target=work, args=(argv, self.log))
        process.start()
        return process

    def finish(self, process: Any) -> int:
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            pytest.fail("the command does not end")
        return int(process.exitcode)

    def printed(self) -> str:
        return self.log.read_text()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def write_requests(path: Path, count: int) -> None:
    """Sums, some of them with several samples."""
    with path.open("w") as file:
        for index, (prompt, _) in enumerate(sample_problems(count)):
            hot = dict(temperature=2.0, n=2) if index % 5 == 0 else dict(temperature=0)
            body = dict(prompt=prompt, max_tokens=8, **hot)
            line = dict(custom_id=f"r{index}", method="POST", url="/v1/completions", body=body)
            file.write(json.dumps(line) + "\n")


def answers(output: Path) -> dict[str, Any]:
    """The result of each request; every line must be a record, and ids unique."""
    answers: dict[str, Any] = {}
    for line in output.read_bytes().splitlines(keepends=True):
        assert line.endswith(b"\n")
        record = json.loads(line)
        assert record["custom_id"] not in answers, "a request was repeated"
        assert record["error"] is None
        body = record["response"]["body"]
        usage = {k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"}
        answers[record["custom_id"]] = (record["id"], body["choices"], usage)
    return answers


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for_growth(path: Path, growth: int, process: Any) -> None:
    """Wait until the job has written `growth` bytes."""
    goal = size(path) + growth
    wait_until("the job writes nothing", lambda: size(path) >= goal or not process.is_alive())


@pytest.mark.slow
def test_a_killed_job_neither_repeats_nor_loses_a_request(runs: Runs) -> None:
    """It is killed at random moments and restarted; sometimes its last record is cut in two."""
    write_requests(runs.input, NUM_REQUESTS)
    undisturbed = runs.output.with_name("undisturbed.jsonl")
    assert runs.finish(runs.start(output=undisturbed)) == 0, runs.printed()
    rng, total, kills = random.Random(11), size(undisturbed), 0
    while kills < NUM_KILLS:
        process = runs.start()
        wait_for_growth(runs.output, rng.randrange(max(1, total // NUM_KILLS)), process)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.join(LIMIT)
        assert process.exitcode in (-signal.SIGKILL, 0), runs.printed()
        kills += 1
        if rng.random() < 0.5 and size(runs.output):
            last = runs.output.read_bytes().splitlines(keepends=True)[-1]
            os.truncate(runs.output, size(runs.output) - rng.randrange(1, len(last)))
    done = runs.output.read_bytes().count(b"\n")
    assert done > 0, "every kill came too soon"
    assert runs.finish(runs.start()) == 0, runs.printed()
    got = answers(runs.output)
    assert got == answers(undisturbed)
    assert len(got) == NUM_REQUESTS


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(runs: Runs) -> None:
    write_requests(runs.input, 200)
    process = runs.start()
    wait_for_growth(runs.output, 1000, process)
    os.kill(process.pid, signal.SIGINT)
    assert runs.finish(process) == 130, runs.printed()
    assert "Traceback" not in runs.printed()
    assert 0 < len(answers(runs.output)) < 200
    assert runs.finish(runs.start()) == 0, runs.printed()
    assert len(answers(runs.output)) == 200


def test_two_commands_cannot_write_one_output(runs: Runs) -> None:
    write_requests(runs.input, 400)
    first = runs.start()
    wait_for_growth(runs.output, 1, first)
    assert runs.finish(runs.start()) == 1
    assert "nanovllm: error: another job is writing" in runs.printed()
    assert runs.finish(first) == 0, runs.printed()
    assert len(answers(runs.output)) == 400


def test_the_input_is_refused_as_output(runs: Runs) -> None:
    runs.input.write_text('{"prompt": "1+1="}\n')
    os.link(runs.input, runs.output)
    assert runs.finish(runs.start()) == 2
    assert runs.printed() == "nanovllm: error: the output must not be the input\n"
    assert runs.input.read_text() == '{"prompt": "1+1="}\n'


@pytest.mark.slow
def test_errors_are_a_failure(runs: Runs) -> None:
    """A restarted job still fails, though it computes nothing."""
    runs.input.write_text('{"prompt": "1+1="}\n{"prompt": 5}\n')
    assert runs.finish(runs.start("--strict")) == 1
    assert "nanovllm: error: line 2: prompt must be" in runs.printed()
    assert runs.finish(runs.start()) == 1
    assert "1 computed, 1 failed, 0 done before" in runs.printed()
    assert runs.finish(runs.start()) == 1
    assert "0 computed, 0 failed, 2 done before" in runs.printed()


def test_a_start_that_fails_leaves_no_output(runs: Runs) -> None:
    """One that was there before stays."""
    write_requests(runs.input, 1)
    assert runs.finish(runs.start("--model", "/nope/x")) == 1
    assert "model directory '/nope/x' does not exist" in runs.printed()
    assert not runs.output.exists()
    runs.output.write_bytes(b"")
    assert runs.finish(runs.start("--model", "/nope/x")) == 1
    assert runs.output.read_bytes() == b""


def test_an_empty_input_is_no_failure(runs: Runs) -> None:
    runs.input.write_bytes(b"")
    assert runs.finish(runs.start()) == 0
    assert runs.output.read_bytes() == b""
    assert runs.printed().startswith("0 computed, 0 failed, 0 done before")


def test_a_record_that_the_input_does_not_have_is_an_error(runs: Runs) -> None:
    """A file's lines are counted first, so the error comes before the work."""
    lines = [f'{{"prompt": "{index}+1="}}\n' for index in range(1, 5)]
    runs.input.write_text("".join(lines))
    assert runs.finish(runs.start("--temperature", "0")) == 0, runs.printed()
    before = runs.output.read_bytes()
    (fourth,) = (line for line in before.splitlines(keepends=True) if b"line-4" in line)
    runs.output.write_bytes(fourth)
    runs.input.write_text("".join(lines[:3]))
    kept = runs.output.read_bytes()
    assert runs.finish(runs.start("--temperature", "0")) == 1
    assert runs.printed().endswith(
        f"nanovllm: error: {runs.output}, line 1, is a record of line 4, where the input has no"
        " request; remove that record, or choose another output\n"
    )
    assert runs.output.read_bytes() == kept
    runs.input.write_text("".join([*lines[:3], "\n"]))  # a blank line is found when it is read
    assert runs.finish(runs.start("--temperature", "0")) == 1
    *_, summary, error = runs.printed().splitlines()
    assert (
        summary.startswith("3 computed, 0 failed, 0 done before")
        and "is a record of line 4" in error
    )
    assert runs.output.read_bytes().count(b"\n") == 4
