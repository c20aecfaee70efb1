"""Options that several subcommands share: for the engine, for sampling and for chat templates."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.command.field_options import given_options, option_flag
from nanovllm.command.groups import add_grouped_options
from nanovllm.command.interrupts import Interruptible
from nanovllm.command.spelling import spelled, spelled_errors
from nanovllm.command.waiting_line import waiting_line
from nanovllm.config import Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.option_pairs import log_unused
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.json_text import parse_json

if TYPE_CHECKING:
    from nanovllm.llm import LLM

OF_ADAPTERS = ("max_loras", "max_lora_rank", "max_cpu_loras")  # options that need `enable_lora`
FLAG = "--chat-template-kwargs"
THINKING = """'{"enable_thinking": false}'"""  # as a shell takes it


class UsageError(Exception):
    """A mistake in the command line."""


class Once(argparse.Action):
    """An option that may be given once, as the last of several inputs would be the only one."""

    def __call__(
        self,
        _: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        __: str | None = None,
    ) -> None:
        """Set the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "may be given once")
        setattr(namespace, self.dest, values)


def user_path(text: str) -> str:
    """A path with the user's home for `~`, which shells do not replace in quotes or after `=`."""
    return os.path.expanduser(text)  # noqa: PTH111 - a Path would turn "" into "."


def user_file(text: str) -> Path:
    """The Path of `user_path`."""
    return Path(user_path(text))


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add an argument to give the model without its flag."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")


def take_model(args: argparse.Namespace) -> None:
    """Let the model that is given without its flag be the option's value."""
    if getattr(args, "model_name", None) is not None:
        if "model" in args:
            raise UsageError("MODEL and --model exclude each other")
        args.model = args.model_name


def add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an option for each field of `Config`; `defaults` replace the fields' in the help."""
    defaults = {"model": "the embedded model, which adds numbers", **defaults}
    add_grouped_options(parser, Config, defaults)


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an option for each field of `SamplingParams`; `defaults` are the command's own."""
    add_grouped_options(parser, SamplingParams, defaults)


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Add options for a conversation's system message and for its chat template."""
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        FLAG, metavar="JSON",
        help="the template's own options, such as '{\"enable_thinking\": false}'",
    )  # fmt: skip


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chat template's own options: any JSON object."""
    text, example = args.chat_template_kwargs, f"an example is {FLAG} {THINKING}"
    try:
        value = {} if text is None else parse_json(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} is not valid JSON: {error}; {example}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{FLAG} must be a JSON object, got {text}; {example}")
    if value:
        from nanovllm.chat.template_fields import check_template_options

        try:
            check_template_options(value)
        except ValueError as error:
            raise UsageError(str(error).replace("chat_template_kwargs", FLAG, 1)) from None
    return value


def first_messages(system: str | None) -> list[dict[str, str]]:
    """The messages at the start of a conversation."""
    return [{"role": "system", "content": system}] if system else []


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The checked fields of `Config` that the command line sets, always with a model."""
    take_model(args)
    options = {"model": EMBEDDED_MODEL} | given_options(args, Config)
    with usage_errors(Config):
        Config(**options)
    for name in OF_ADAPTERS:
        if name in options and not options.get("enable_lora"):
            raise UsageError(f"{option_flag(Config, name)} needs --enable-lora")
    return options


def sampling_options(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The checked fields of `SamplingParams` that the command line or `defaults` set."""
    options = defaults | given_options(args, SamplingParams)
    with usage_errors(SamplingParams):
        SamplingParams(**options)
    if options.get("priority") and getattr(args, "scheduling_policy", None) == "fcfs":
        raise UsageError("--priority and --scheduling-policy fcfs exclude each other")
    return options


def recommended_options(llm: "LLM", given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that the model recommends and that are not `given`."""
    from nanovllm.models.generation_config import recommended_fields

    fields = recommended_fields(llm.get_default_sampling_params())
    return {name: value for name, value in fields.items() if name not in given}


@contextlib.contextmanager
def open_llm(options: Mapping[str, Any]) -> "Iterator[LLM]":
    """Import PyTorch, load the model, make the engine, and close it after the block.

    In the block Ctrl-C raises KeyboardInterrupt.
    """
    with waiting_line("loading PyTorch ..."):
        from nanovllm.llm import LLM

    with spelled_errors(Config):
        opened = LLM(**options)
    log_unused(options, opened.config.device)
    with opened as llm, Interruptible():
        yield llm


@contextlib.contextmanager
def usage_errors(*kinds: type) -> Iterator[None]:
    """Turn the error of a field's check into a `UsageError`, with the flags of these classes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(spelled(str(error), *kinds)) from None
