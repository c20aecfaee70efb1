"""Answer a file of requests; run again with the same arguments, it resumes where it stopped.

INPUT is JSON Lines in the format of OpenAI's batches, or of lines such as
  {"prompt": "12+34=", "max_tokens": 8}
  {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
Sampling options apply to lines that do not set them. Results are appended to OUTPUT in the order in
which they are finished. The status is 1 if some lines have errors.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from nanovllm.command import interrupts
from nanovllm.command.options import (
    Once,
    UsageError,
    add_engine_options,
    add_sampling_options,
    engine_options,
    open_llm,
    sampling_options,
    user_file,
    user_path,
)

if TYPE_CHECKING:
    from nanovllm.batch.job import BatchJob, Tally
    from nanovllm.batch.journal import Journal
    from nanovllm.llm import LLM

NAME = "run-batch"
SUMMARY = "answer a file of requests, and resume where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "input_name", type=user_path, nargs="?", metavar="INPUT", help="JSON Lines; - is stdin"
    )
    parser.add_argument(
        "-i",
        "--input-file",
        dest="input",
        action=Once,
        type=user_path,
        metavar="INPUT",
        help="the same as INPUT",
    )
    parser.add_argument(
        "-o", "--output", "--output-file", type=user_file, required=True, metavar="OUTPUT",
        help="the file of results",
    )  # fmt: skip
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at a bad line, instead of writing an error for it",
    )
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the job, and write a summary to stdout."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            raise KeyboardInterrupt("stopped; the same command resumes here") from None
        raise


def _run(args: argparse.Namespace) -> int:
    options, defaults = engine_options(args), sampling_options(args)
    if str(args.output) in ("-", "."):  # an empty path is "."
        raise UsageError("OUTPUT must be a file: the job resumes from it")
    with _open_input(_input_of(args)) as file:
        if args.output.exists() and os.path.samestat(args.output.stat(), os.fstat(file.fileno())):
            raise UsageError("the output must not be the input")
        from nanovllm.batch.job import BatchJob
        from nanovllm.batch.lines import count_lines, read_lines

        num_lines = count_lines(file) if file.seekable() else None
        with _open_output(args.output, num_lines) as journal, open_llm(options) as llm:
            job, start = BatchJob(llm, journal, defaults, args.strict), time.perf_counter()
            with _bar(llm, num_lines, job) as bar:
                for tally in job.run(read_lines(file)):
                    if bar is not None:
                        bar.n, bar.initial = (
                            tally.lines,
                            tally.skipped,
                        )  # skipped lines take no time
            num_failed = journal.num_failed + job.tally.failed
            print(_summary(job.tally, journal.num_failed, time.perf_counter() - start))
            journal.check_taken()  # at the end, so that no finished work is lost
    return 1 if num_failed else 0


def _input_of(args: argparse.Namespace) -> str:
    """The name of the input, which is given by its place or by its flag."""
    given = [name for name in (args.input_name, args.input) if name is not None]
    if len(given) != 1:
        raise UsageError("INPUT and -i exclude each other" if given else "INPUT is missing")
    if not given[0]:
        raise UsageError("INPUT must be a file, or - for stdin, got ''")
    return str(given[0])


@contextlib.contextmanager
def _open_input(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as file:
        yield file


@contextlib.contextmanager
def _open_output(path: Path, num_lines: int | None) -> "Iterator[Journal]":
    """The journal. A Ctrl-C that ends the process at once leaves no empty file either."""
    from nanovllm.batch.journal import Journal

    with Journal(path, num_lines) as journal:
        interrupts.cleanups.append(journal.remove_unused)
        try:
            yield journal
        finally:
            interrupts.cleanups.pop()


def _bar(llm: "LLM", num_lines: int | None, job: "BatchJob") -> AbstractContextManager[Any]:
    """A bar over the input's lines; None unless stderr is a terminal."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from nanovllm.engine.requests.progress import progress_bar

    def failures() -> list[str]:
        return [f"{job.tally.failed} failed"] if job.tally.failed else []

    return progress_bar(llm, num_lines, "Batch", failures)


def _summary(tally: "Tally", failed_before: int, seconds: float) -> str:
    of_them = f" ({failed_before} failed)" if failed_before else ""
    return (
        f"{tally.computed} computed, {tally.failed} failed, {tally.skipped} done before{of_them};"
        f" {tally.tokens} tokens in {seconds:.1f} s, {tally.tokens / seconds:.0f} tok/s"
    )
