"""Measure any server with OpenAI's API: throughput and the times of its streams.

  nanovllm bench serve --base-url http://127.0.0.1:8000 --input-len 512 --output-len 128
  nanovllm bench serve --request-rate 4 --goodput ttft:200 tpot:50
  nanovllm bench serve --max-concurrency 16 --endpoint chat --dataset questions.jsonl

A line of a dataset has a `prompt` or `messages`, and may have `max_tokens`. All times are of this
client's clock. The status is 1 if a request fails.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.bench.serve.options import ServerLoad
from nanovllm.command.field_options import add_field_options, given_options, json_reader
from nanovllm.command.options import UsageError, usage_errors, user_file

NAME = "bench serve"
SUMMARY = "measure a server with OpenAI's API under load"
BASE_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("NANOVLLM_API_KEY", "OPENAI_API_KEY")
EXTRA_BODY = """--extra-body '{"top_p": 0.9}'"""
GOODPUT = "--goodput ttft:200 tpot:50 e2el:2000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", default=BASE_URL, metavar="URL",
        help=f"with or without /v1 (default: {BASE_URL})",
    )  # fmt: skip
    server.add_argument(
        "--model", metavar="NAME", help="what is asked (default: the first of /v1/models)"
    )
    server.add_argument(
        "--api-key", metavar="KEY",
        help=f"(default: {' or '.join(KEY_VARIABLES)} of the environment, if set)",
    )  # fmt: skip
    server.add_argument(
        "--extra-body", type=json_reader(EXTRA_BODY), metavar="JSON", default={},
        help="fields that are added to each request; null removes one",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    load.add_argument(
        "--dataset", type=user_file, metavar="FILE",
        help="JSON Lines of prompts (default: random prompts)",
    )  # fmt: skip
    add_field_options(load, ServerLoad, {})
    output = parser.add_argument_group("output")
    output.add_argument(
        "--goodput", nargs="+", type=limit, metavar="NAME:MS", default=[],
        help="also count the requests per second that keep these limits, in milliseconds:"
        f" {GOODPUT}",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="write one JSON object")
    output.add_argument(
        "--plot", type=user_file, metavar="FILE",
        help="draw the times and the course of the run (needs matplotlib)",
    )  # fmt: skip


def limit(text: str) -> tuple[str, float]:
    """Parse a limit of goodput such as `ttft:200`."""
    from nanovllm.bench.serve.summary import LIMITED

    name, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if name not in LIMITED or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be NAME:MS with a NAME of {', '.join(LIMITED)} and MS > 0, got {text!r}"
        )
    return name, value


def run(args: argparse.Namespace) -> int:
    """Measure the server and print the figures; return 1 if a request has failed."""
    from nanovllm.bench.serve.client import Address
    from nanovllm.bench.serve.measure import ServerBenchmark, measure
    from nanovllm.bench.serve.plot import check_plot, plot
    from nanovllm.bench.serve.prompts import read_dataset
    from nanovllm.bench.serve.summary import summarize, text

    _check(args)
    with usage_errors(ServerLoad):
        load, address = ServerLoad(**given_options(args, ServerLoad)), Address.parse(args.base_url)
    if args.plot is not None:
        with usage_errors():
            check_plot(args.plot)
    dataset = None if args.dataset is None else read_dataset(args.dataset, load)
    keys = (args.api_key, *map(os.environ.get, KEY_VARIABLES))
    job = ServerBenchmark(
        address, next(filter(None, keys), None), args.model, load, dataset, args.extra_body
    )
    measured, model = measure(job)
    result = {"base_url": str(address), "model": model, "load": shown(load, args.dataset)}
    result |= summarize(measured, dict(args.goodput))
    title = f"{address}, {model}, {load.endpoint}"
    print(json.dumps(result) if args.json else f"{title}\n{text(result)}")
    if args.plot is not None:
        plot(measured, title, args.plot)
    return 1 if result["failed"] else 0


def _check(args: argparse.Namespace) -> None:
    if not isinstance(args.extra_body, dict):
        raise UsageError(f"--extra-body must be a JSON object; an example is {EXTRA_BODY}")
    names = [name for name, _ in args.goodput]
    if len(names) > len(set(names)):
        raise UsageError("--goodput has two limits of one kind")


def shown(load: ServerLoad, dataset: Path | None) -> Mapping[str, Any]:
    """The load's value for JSON, which has no infinity."""
    rate = None if load.request_rate == float("inf") else load.request_rate
    return {**asdict(load), "request_rate": rate, "dataset": dataset and str(dataset)}
