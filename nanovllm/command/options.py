"""Options of the command line, made from the fields of `Config` and `SamplingParams`.

Names, types and defaults are the fields'; only what an option is good for is said here. An option
that is not given is left to the class, which also checks the values.
"""

import argparse
import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.config import ATTENTION_BACKENDS, DTYPES, LOAD_FORMATS, SCHEDULINGS, Config
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

HELP = {
    "model": "a directory with config.json and safetensors files, or a hub id",
    "tokenizer": "another directory or hub id",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": ", ".join(DTYPES),
    "load_format": f"{', '.join(LOAD_FORMATS)}; dummy: random weights, only config.json is needed",
    "max_num_batched_tokens": "tokens in one step",
    "max_num_seqs": "sequences that run at once",
    "max_model_len": "longest prompt and output together; none: what fits",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "cpu_kvcache_gib": "size of the KV pool on a CPU",
    "tensor_parallel_size": "GPUs, or processes on a CPU, that share the model out",
    "enable_expert_parallel": "each of them holds whole experts, not a part of each",
    "enforce_eager": "no CUDA graphs",
    "kvcache_block_size": "tokens in a KV block; none: the backend's",
    "num_kvcache_blocks": "size of the KV pool in blocks; none: what fits",
    "attention_backend": ", ".join(ATTENTION_BACKENDS),
    "enable_prefix_caching": "reuse the KV of prompts that begin alike",
    "scheduling": ", ".join(SCHEDULINGS),
    "overlap": "begin a step before the last one's tokens are known; none: on a GPU",
    "engine_seed": "decides what requests without a seed of their own sample",
    "temperature": "0 is greedy",
    "top_k": "draw from the k most likely tokens; -1: all",
    "top_p": "draw from the most likely tokens with this share of the mass",
    "min_p": "draw from tokens with this share of the most likely one's probability",
    "max_tokens": "tokens to generate at most; none: as many as fit",
    "min_tokens": "tokens to generate before one that stops may come",
    "stop": "a text that ends the output and is cut off; may be given several times",
    "stop_token_ids": "further tokens that end the output",
    "ignore_eos": "go on after the end-of-text token",
    "seed": "makes samples reproducible",
    "n": "samples of each prompt",
    "logprobs": "log-probabilities of each token and of so many of the likeliest",
    "prompt_logprobs": "the same of the prompt's tokens",
    "repetition_penalty": "divides logits of tokens in prompt or output",
    "presence_penalty": "taken off the logits of tokens in the output",
    "frequency_penalty": "taken off for each time that a token is in the output",
    "logit_bias": "added to the logits of tokens",
    "allowed_token_ids": "the only tokens that may come",
    "bad_words": "a text that may not come; may be given several times",
    "include_stop_str_in_output": "do not cut stop texts off",
    "skip_special_tokens": "leave them out of the text",
    "priority": "a lower number is admitted sooner",
}


class UsageError(Exception):
    """A mistake in the command line."""


def token_ids(text: str) -> list[int]:
    """Parse `1,2,3`."""
    return [int(part) for part in text.split(",")]


def biases(text: str) -> dict[int, float]:
    """Parse `1=-100,2=5.5`."""
    pairs = (part.split("=") for part in text.split(","))
    return {int(token): float(bias) for token, bias in pairs}


# How an option of a field's type is read, and what stands for its value in the help.
READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Iterable[int]: (token_ids, "ID,..."),
    Iterable[str]: (str, "TEXT"),
    Mapping[int, float]: (biases, "ID=BIAS,..."),
}


def add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """An option for each field of `Config`; without a model it is the embedded one.

    `defaults` are what the help shows of the command's own.
    """
    group = parser.add_argument_group("engine")
    defaults = {"model": "the embedded one, which adds numbers", **defaults}
    for field in dataclasses.fields(Config):
        default = defaults.get(field.name, field.default)
        add_field_option(group, field, _engine_option(field.name), default)


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """An option for each field of `SamplingParams`; `defaults` are the command's own."""
    group = parser.add_argument_group("sampling")
    for field in dataclasses.fields(SamplingParams):
        add_field_option(group, field, field.name, defaults.get(field.name, field.default))


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """What a conversation begins with, and how its template is told to make a prompt of it."""
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON",
        help="the template's own options, such as '{\"enable_thinking\": false}'",
    )  # fmt: skip


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chat template's own options; checked as far as they can be without it."""
    text = args.chat_template_kwargs
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--chat-template-kwargs must be a JSON object, got {text}")
    return value


def first_messages(system: str | None) -> list[dict[str, str]]:
    """What a conversation begins with."""
    return [{"role": "system", "content": system}] if system else []


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Config` that the command line has, and a model; checked."""
    given = {
        field.name: getattr(args, _engine_option(field.name))
        for field in dataclasses.fields(Config)
        if _engine_option(field.name) in args
    }
    options = {"model": EMBEDDED_MODEL} | given
    with usage_errors():
        Config(**options)
    return options


def sampling_options(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that the command line has, on the command's own; checked."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    options = defaults | {name: getattr(args, name) for name in names if name in args}
    with usage_errors():
        SamplingParams(**options)
    return options


def open_llm(options: Mapping[str, Any]) -> "LLM":
    """The engine. Here PyTorch is imported, and the model loaded."""
    from nanovllm.llm import LLM

    return LLM(**options)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What a field's check refuses is a mistake in the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def _engine_option(name: str) -> str:
    """Where both classes have a field, the plain name is that of the request's."""
    shared = name in {field.name for field in dataclasses.fields(SamplingParams)}
    return f"engine_{name}" if shared else name


def add_field_option(
    group: argparse._ArgumentGroup,
    field: dataclasses.Field[Any],
    name: str,
    default: Any,
    texts: Mapping[str, str] = HELP,
) -> None:
    """An option for a field; if it is not given, it is not in the namespace."""
    flag, kind = "--" + name.replace("_", "-"), _main_type(field.type)
    shown = "none" if default is None else default
    more: dict[str, Any]
    if kind is bool:
        shown = {True: "yes", False: "no"}.get(default, shown)
        more = dict(action=argparse.BooleanOptionalAction)
    else:
        read, metavar = READERS[kind]
        more = dict(type=_reader(read, _takes_none(field.type), metavar), metavar=metavar)
        more |= dict(action="append") if kind == Iterable[str] else {}
    action = group.add_argument(flag, dest=name, default=argparse.SUPPRESS, **more)
    action.help = f"{texts[name]} (default: {shown})"  # to which some versions add one of their own


def _main_type(annotation: Any) -> Any:
    """The widest type that is not None: of a text and a list of texts, the list."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    return [part for part in typing.get_args(annotation) if part is not types.NoneType][-1]


def _takes_none(annotation: Any) -> bool:
    """Whether `none` says something: for texts it is one."""
    return types.NoneType in typing.get_args(annotation) and _main_type(annotation) in (int, float)


def _reader(read: Callable[[str], Any], none_fits: bool, metavar: str) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        if none_fits and text == "none":
            return None
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"cannot read {text!r} as {metavar}") from None

    return value
