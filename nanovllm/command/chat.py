"""Talk with a model, in its chat template; answers are written as they come.

Ctrl-C stops an answer, Ctrl-D ends. /help tells of the commands.
"""

import argparse
import contextlib
import sys
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

NAME = "chat"
SUMMARY = "talk with a model"
OWN_DEFAULTS = {"max_tokens": None}  # an answer ends where the model ends it
HELP = """\
/reset          forget the conversation
/system TEXT    begin another one, with this system message; without TEXT, with none
/quit           end, as Ctrl-D does
/help           this
Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_template_options(parser)
    add_engine_options(parser)
    add_sampling_options(parser, **OWN_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    options, params = engine_options(args), SamplingParams(**sampling_options(args, **OWN_DEFAULTS))
    if params.n != 1:
        raise UsageError(f"n must be 1 in a conversation, got {params.n}")
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise UsageError("a conversation shows no log-probabilities")
    chat_template_kwargs = template_options(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (arrow keys, for `input`)
    with open_llm(options) as llm:
        if not llm.has_chat_template:
            raise ValueError(f"{llm.config.model} has no chat template; see nanovllm generate")
        Conversation(llm, params, chat_template_kwargs, args.system).talk()
    return 0


class Conversation:
    """The messages so far, and the model that answers."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, chat_template_kwargs: dict[str, Any],
        system: str | None,
    ) -> None:  # fmt: skip
        self.llm = llm
        self.params = params
        self.chat_template_kwargs = chat_template_kwargs
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget what was said; `system` says how to answer from now on."""
        self.system = system
        self.messages = first_messages(system)

    def talk(self) -> None:
        """Read and answer lines until Ctrl-D."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{self.llm.config.model}; /help tells of the commands", file=sys.stderr)
        while True:
            try:
                self.hear(input(">>> " if is_terminal else "").strip())
            except EOFError:
                if is_terminal:
                    print()
                return
            except KeyboardInterrupt:  # drops the line, as a shell does
                print()

    def hear(self, line: str) -> None:
        """Follow a command, answer anything else."""
        if line.startswith("/"):
            self.obey(line)
        elif line:
            self.answer(line)

    def obey(self, line: str) -> None:
        """Follow a command; EOFError if it ends the conversation."""
        command, _, text = line.partition(" ")
        if command == "/reset":
            self.begin(self.system)
        elif command == "/system":
            self.begin(text.strip() or None)
        elif command == "/quit":
            raise EOFError
        elif command == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"no command {command}; /help tells of them", file=sys.stderr)

    def answer(self, text: str) -> None:
        """Write the model's answer. What Ctrl-C leaves of it has been said."""
        messages = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            prompts = self.llm.chat_prompts(
                [messages], chat_template_kwargs=self.chat_template_kwargs
            )
            with contextlib.closing(self.llm.stream(prompts, self.params)) as events:  # type: ignore[type-var]
                for event in events:
                    said += event["text"]
                    sys.stdout.write(event["text"])
                    sys.stdout.flush()
            print()
        except KeyboardInterrupt:
            print(" ...", flush=True)
        except ValueError as error:  # the conversation has become too long, or has no template
            print(f"{error}; /reset begins anew", file=sys.stderr)
            return
        self.messages = [*messages, {"role": "assistant", "content": said}]
