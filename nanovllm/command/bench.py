"""Measure throughput on random prompts, and compare it with the roofline of this machine.

  nanovllm bench
  nanovllm bench --shape qwen3-0.6b
  nanovllm bench --model ~/models/Qwen3-0.6B --num-seqs 64 --repeats 5

The roofline is the least time that the workload can take. It is computed from two rates of the
machine, which are measured first. With --json stdout has one JSON object, and the text for people
goes to stderr. A server is measured by `nanovllm bench serve`.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.shapes import SHAPES
from nanovllm.bench.workload import MAX_MODEL_LEN, WorkloadOptions
from nanovllm.command import interrupts
from nanovllm.command.field_options import EXAMPLES, add_field_options, given_options
from nanovllm.command.options import (
    UsageError,
    add_engine_options,
    engine_options,
    usage_errors,
    user_file,
)
from nanovllm.command.spelling import spelled_errors
from nanovllm.config import Config

if TYPE_CHECKING:
    from nanovllm.bench.plan import Plan

NAME = "bench"
STDOUT = Path("-")  # for --json without a file
SUMMARY = "measure throughput and compare it with the roofline"


def add_arguments(parser: argparse.ArgumentParser, default_shape: str | None = None) -> None:
    """Add the command's arguments; `default_shape` is run if no model is given."""
    shown = {"max_model_len": "4096, or the model's"}
    if default_shape is not None:
        shown["model"] = "none: a shape is run"
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of this shape instead of a model"
        f" (default: {default_shape or 'none'})",
    )  # fmt: skip
    parser.set_defaults(default_shape=default_shape)
    add_field_options(parser.add_argument_group("workload"), WorkloadOptions, {})
    parser.add_argument(
        "--repeats", type=positive, metavar="N",
        help="runs to take the median of (default: 3, or 1 if a run takes a minute)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=user_file, metavar="FILE",
        help="write a trace of a few steps after the measured runs",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=user_file, metavar="FILE", nargs="?", const=STDOUT,
        help="write all figures as one JSON object: to the file, or without one to stdout",
    )  # fmt: skip
    add_engine_options(parser, **shown)


def positive(text: str) -> int:
    """Parse an int above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def run(
    args: argparse.Namespace,
    measure: "Callable[[Plan, dict[str, Any]], None] | None" = None,
) -> int:
    """Print the roofline, run the workload, and print the figures, as JSON if that is asked for.

    `measure` runs the workload and adds its figures to the result; the default runs this engine.
    """
    people = sys.stderr if args.json == STDOUT else sys.stdout
    with contextlib.redirect_stdout(people):
        line = _measured(args, measure)
    if args.json == STDOUT:
        print(line)
    elif args.json is not None:
        args.json.write_text(line + "\n", encoding="utf-8")
    return 0


def _measured(
    args: argparse.Namespace, measure: "Callable[[Plan, dict[str, Any]], None] | None"
) -> str:
    """Run the benchmark, print it for people, and return the result as JSON."""
    shape = args.shape or (None if "model" in args else args.default_shape)
    _check(args, shape)
    options = engine_options(args)
    lengths = _lengths(args, options.get("max_model_len") or (MAX_MODEL_LEN if shape else None))
    from nanovllm.bench.measure import describe, print_floor, run_alone
    from nanovllm.bench.plan import errors_name_shapes, make_plan, named_by_shape

    with (
        _scratch() as scratch,
        spelled_errors(WorkloadOptions, Config),
        errors_name_shapes(scratch),
    ):
        plan = make_plan(options, shape, lengths, scratch)
        for path in (args.json, args.profile):
            if path not in (None, STDOUT):
                _check_writable(path)
        result = describe(plan)
        print_floor(result)
        if measure is not None:
            measure(plan, result)
        else:
            run_alone(plan, result, args.repeats, args.profile)
    return named_by_shape(json.dumps(result), scratch)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder; it is also removed if Ctrl-C ends the process at once."""
    with tempfile.TemporaryDirectory() as folder:
        interrupts.cleanups.append(lambda: shutil.rmtree(folder))
        try:
            yield Path(folder)
        finally:
            interrupts.cleanups.pop()


def _check(args: argparse.Namespace, shape: str | None) -> None:
    """Raise for options that exclude each other."""
    if args.shape is not None and "model" in args:
        raise UsageError("--model and --shape exclude each other")
    if shape is not None and getattr(args, "load_format", "dummy") != "dummy":
        raise UsageError(
            f"a shape has random weights; --load-format {args.load_format} needs --model"
        )
    given = {name: getattr(args, name, None) for name in ("acceptance", "speculative_config")}
    asked = given["speculative_config"]
    guesses = isinstance(asked, dict) and asked.get("method") not in ("grammar", "none")
    if given["acceptance"] is not None and not guesses:
        example = EXAMPLES["speculative_config"]
        raise UsageError(f"--acceptance needs drafts to accept: add {example}")
    if args.json is not None and args.json == args.profile:
        raise UsageError("--json and --profile must be different files")


def _check_writable(path: Path) -> None:
    """Raise before anything is measured if a file cannot be written; leave it unchanged."""
    was_there = path.exists()
    path.open("a").close()
    if not was_there:
        path.unlink()


def _lengths(args: argparse.Namespace, max_model_len: int | None) -> WorkloadOptions:
    """The workload's checked lengths; without `max_model_len`, the model limits them."""
    with usage_errors(WorkloadOptions, Config):
        lengths = WorkloadOptions(**given_options(args, WorkloadOptions))
        if max_model_len is not None:
            lengths.check_fit(max_model_len)
    return lengths
