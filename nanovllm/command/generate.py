"""Complete prompts and write the texts to stdout, in the order of the prompts.

  nanovllm generate '12+34=' --temperature 0
  echo '12+34=' | nanovllm generate
  nanovllm generate --lines -f prompts.txt --json

The text of a single prompt is streamed. With --chat answers have no markers, and sampling
parameters that are not given are those of the model's generation_config.json. With --json each
prompt's whole output is a line of JSON.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.command.answer_writer import AnswerWriter
from nanovllm.command.options import (
    Once,
    UsageError,
    add_engine_options,
    add_sampling_options,
    add_template_options,
    engine_options,
    first_messages,
    open_llm,
    recommended_options,
    sampling_options,
    template_options,
    user_path,
)
from nanovllm.command.spelling import spelled_errors
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.outputs import CompletionOutput, StreamEvent

NAME = "generate"
SUMMARY = "complete prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text to complete (default: stdin is one)"
    )
    parser.add_argument(
        "-f", "--file", type=user_path, action=Once, help="read the prompt from a file; - is stdin"
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="each line of the file or stdin that is not empty is a prompt",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message for the chat template"
    )
    add_template_options(parser)
    parser.add_argument("--json", action="store_true", help="write whole outputs, one a line")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts."""
    options, given = engine_options(args), sampling_options(args)
    params = SamplingParams(**given)
    _check(args, params)
    template_kwargs, texts = template_options(args), _prompts(args)
    with open_llm(options) as llm:
        if args.chat:
            params = SamplingParams(**recommended_options(llm, given) | given)
            first = first_messages(args.system)
            talks = [[*first, {"role": "user", "content": text}] for text in texts]
            kwargs: Any = {"chat_template_kwargs": template_kwargs}
            stream = functools.partial(llm.stream_chat, talks, params, **kwargs)
            generate = functools.partial(llm.chat, talks, params, **kwargs)
        else:
            stream = functools.partial(llm.stream, texts, params)
            generate = functools.partial(llm.generate, texts, params)
        with spelled_errors(SamplingParams, Config):
            if len(texts) == 1 and params.n == 1 and not args.json:
                return _stream(stream())
            outputs = generate(use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        if args.json:
            print(json.dumps({"prompt": text, **output}))
            continue
        for sample in output["outputs"]:
            writer = AnswerWriter()
            writer.write(sample.message or {"content": sample["text"]})
            writer.end("\n")
    names = [f"prompt {number}: " if len(texts) > 1 else "" for number in range(1, len(texts) + 1)]
    return max(
        _status(sample, name)
        for name, output in zip(names, outputs, strict=True)
        for sample in output["outputs"]
    )


def _status(ended: "CompletionOutput | StreamEvent", name: str = "") -> int:
    """1 for a sample that ends with an error; prints the error to stderr with the prompt's name."""
    if ended["finish_reason"] != "error":
        return 0
    print(f"nanovllm: error: {name}{ended['stop_reason']}", file=sys.stderr)
    return 1


def _check(args: argparse.Namespace, params: SamplingParams) -> None:
    """Raise for options that need others."""
    wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if wants_logprobs and not args.json:
        given = "logprobs" if params.logprobs is not None else "prompt-logprobs"
        raise UsageError(f"--{given} needs --json")
    if not args.chat and (args.system is not None or args.chat_template_kwargs is not None):
        given = "system" if args.system is not None else "chat-template-kwargs"
        raise UsageError(f"--{given} needs --chat")


def _prompts(args: argparse.Namespace) -> list[str]:
    """The texts to complete. A newline at the end of a file is not part of its prompt."""
    if args.prompts:
        if args.file is not None or args.lines:
            raise UsageError(
                "prompts in the command line and -f FILE or --lines exclude each other"
            )
        prompts: list[str] = args.prompts
        if not all(prompts):
            raise UsageError("a prompt is empty")
        return prompts
    if args.file in (None, "-"):
        if sys.stdin.isatty():
            print("Enter the prompt, then Ctrl-D:", file=sys.stderr)
        data = sys.stdin.buffer.read()
    else:
        data = Path(args.file).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8: {error}") from None
    text = text.replace("\r\n", "\n")
    text = text.removesuffix("\n")
    prompts = [line for line in text.split("\n") if line] if args.lines else [text]
    if not any(prompts):
        raise ValueError("the prompt is empty")
    return prompts


def _stream(events: "Iterator[StreamEvent]") -> int:
    """Print the text, or of a chat the answer, as it comes; returns the exit status."""
    writer = AnswerWriter()
    try:
        with contextlib.closing(events):  # type: ignore[type-var]
            for event in events:
                writer.write(event.get("delta", {"content": event["text"]}))
    except KeyboardInterrupt:
        if sys.stdout.isatty():  # otherwise a message would replace the last line of the text
            writer.end("\n")
        raise
    finally:
        writer.end("")  # a terminal does not stay dim
    writer.end("\n")
    return _status(event)  # the last one
