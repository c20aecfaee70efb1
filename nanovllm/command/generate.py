"""Complete prompts: the texts on stdout, in the order of the prompts.

  nanovllm generate '12+34=' --temperature 0
  echo '12+34=' | nanovllm generate
  nanovllm generate --lines -f prompts.txt --json

One prompt is written as it comes. With --json each prompt's output is a line, with all that there
is to know.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.command.options import (
    UsageError,
    add_engine_options,
    add_sampling_options,
    add_template_options,
    engine_options,
    first_messages,
    open_llm,
    sampling_options,
    template_options,
)
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

NAME = "generate"
SUMMARY = "complete prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: stdin is the prompt")
    parser.add_argument("-f", "--file", help="read the prompt from a file; - is stdin")
    parser.add_argument(
        "--lines",
        action="store_true",
        help="each line of file or stdin that is not empty is one",
    )
    parser.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message in the chat template"
    )
    add_template_options(parser)
    parser.add_argument("--json", action="store_true", help="whole outputs, a line each")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts."""
    options, params = engine_options(args), SamplingParams(**sampling_options(args))
    asks = params.logprobs is not None or params.prompt_logprobs is not None
    if asks and not args.json:
        raise UsageError("log-probabilities are in the output of --json alone")
    if not args.chat and (args.system is not None or args.chat_template_kwargs is not None):
        raise UsageError("--system and --chat-template-kwargs are for --chat")
    chat_template_kwargs = template_options(args)
    texts = _prompts(args)
    with open_llm(options) as llm:
        prompts: list[Any] = texts
        if args.chat:
            first = first_messages(args.system)
            conversations = [[*first, {"role": "user", "content": text}] for text in texts]
            prompts = llm.chat_prompts(conversations, chat_template_kwargs=chat_template_kwargs)
        if len(prompts) == 1 and params.n == 1 and not args.json:
            _write_as_it_comes(llm, prompts, params)
            return 0
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        if args.json:
            print(json.dumps({"prompt": text, **output}))
            continue
        for sample in output["outputs"]:
            print(sample["text"])
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """The texts to complete. A file's last line end is not a part of its prompt."""
    if args.prompts:
        if args.file is not None or args.lines:
            raise UsageError("prompts in the command line and --file or --lines exclude each other")
        prompts: list[str] = args.prompts
        return prompts
    if args.file in (None, "-"):
        if sys.stdin.isatty():
            print("The prompt, and Ctrl-D at its end:", file=sys.stderr)
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


def _write_as_it_comes(llm: "LLM", prompts: list[Any], params: SamplingParams) -> None:
    with contextlib.closing(llm.stream(prompts, params)) as events:  # type: ignore[type-var]
        for event in events:
            sys.stdout.write(event["text"])
            sys.stdout.flush()
    print()
