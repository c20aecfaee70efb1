"""Serve a model over HTTP, as OpenAI's API.

SIGTERM and Ctrl-C end it when running requests have finished, or after --drain-seconds; a second
one ends it at once. Sampling options apply to requests that do not set them; without any, those
that the model recommends do.
"""

import argparse
import logging
import sys

from nanovllm.command.field_options import given_options
from nanovllm.command.groups import add_grouped_options
from nanovllm.command.options import (
    UsageError,
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    engine_options,
    sampling_options,
    usage_errors,
)
from nanovllm.command.spelling import spelled_errors
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions, with_key

NAME = "serve"
SUMMARY = "serve a model over HTTP, as OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    add_grouped_options(parser, ServerOptions, {})
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    engine, sampling = engine_options(args), sampling_options(args)
    with usage_errors(ServerOptions):
        options = with_key(ServerOptions(**given_options(args, ServerOptions)))
    if options.allow_lora_updates and not engine.get("enable_lora"):
        raise UsageError("--allow-lora-updates needs --enable-lora")
    if options.allow_priority and engine.get("scheduling_policy") == "fcfs":
        raise UsageError("--allow-priority and --scheduling-policy fcfs exclude each other")
    try:
        from nanovllm.server.serve import serve
    except ImportError as error:
        raise ImportError(
            f"nanovllm serve needs what pip install '.[serve]' installs: {error}"
        ) from None

    def announce(address: str) -> None:
        if sys.stdout.writable():  # services may close it
            print(f"serving {engine['model']} at {address}", flush=True)

    logging.getLogger("nanovllm.server").setLevel(logging.INFO)
    with spelled_errors(ServerOptions, Config, SamplingParams):
        return serve(engine, options, sampling, announce)
