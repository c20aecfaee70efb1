"""Chat with a model through its chat template; answers are streamed.

Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands. On a terminal a message may
have several lines: paste them, or end a line with Alt+Enter or with a backslash. There the model's
reasoning is shown, dim, and the speed of the answer; elsewhere only the answer is written. Sampling
parameters that are not given are those of the model's generation_config.json.
"""

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from nanovllm.command.answer_writer import AnswerWriter
from nanovllm.command.message_input import MessageInput
from nanovllm.command.options import (
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
    user_file,
)
from nanovllm.command.pace import Pace
from nanovllm.command.spelling import spelled_errors
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.chat.chat_format import Turn
    from nanovllm.llm import LLM

NAME = "chat"
SUMMARY = "chat with a model"
OWN_DEFAULTS = {"max_tokens": None}  # the model ends its answers
HELP = """\
/reset          start a new conversation
/system TEXT    start a new conversation with this system message, or with none
/save FILE      write the messages to a new file, as JSON
/quit           end the chat, as Ctrl-D does
/help           show this list
Ctrl-C stops an answer. Alt+Enter, or a backslash at the end of a line, begins another line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_template_options(parser)
    add_engine_options(parser)
    add_sampling_options(parser, **OWN_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends."""
    options, given = engine_options(args), sampling_options(args)
    params = SamplingParams(**OWN_DEFAULTS | given)
    if params.n != 1:
        raise UsageError(f"--n must be 1 in a chat, got {params.n}")
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise UsageError("a chat shows no log-probabilities; see nanovllm generate --json")
    chat_template_kwargs = template_options(args)
    with open_llm(options) as llm:
        if not llm.has_chat_template:
            raise ValueError(f"{llm.config.model} has no chat template; use nanovllm generate")
        recommended = recommended_options(llm, given)
        params = SamplingParams(**OWN_DEFAULTS | recommended | given)
        Conversation(llm, params, chat_template_kwargs, args.system).run(recommended)
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
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Start a new conversation with this system message."""
        self.system = system
        self.messages = first_messages(system)

    def run(self, recommended: dict[str, Any]) -> None:
        """Read and answer messages until Ctrl-D; show the recommended parameters."""
        source = MessageInput()
        if source.is_terminal:
            print(f"{self.llm.config.model}; /help lists the commands", file=sys.stderr)
            if recommended:
                shown = ", ".join(f"{name}={value}" for name, value in recommended.items())
                print(f"as the model recommends: {shown}", file=sys.stderr)
        while True:
            try:
                self.handle(source.read())
            except EOFError:
                if source.is_terminal:
                    print()
                return
            except KeyboardInterrupt:  # discard the line, as a shell does
                print()

    def handle(self, line: str) -> None:
        """Run a command, or answer anything else."""
        if line.startswith("/"):
            self.run_command(line)
        elif line:
            self.answer(line)

    def run_command(self, line: str) -> None:
        """Run a command; EOFError if it ends the chat."""
        command, _, text = line.partition(" ")
        if command == "/reset":
            self.reset(self.system)
            kept = "" if self.system is None else ", with the same system message"
            print(f"a new conversation{kept}", file=sys.stderr)
        elif command == "/system":
            self.reset(text.strip() or None)
            which = "no" if self.system is None else "this"
            print(f"a new conversation, with {which} system message", file=sys.stderr)
        elif command == "/save":
            self.save(text.strip())
        elif command == "/quit":
            raise EOFError
        elif command == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"no command {command}; /help lists the commands", file=sys.stderr)

    def save(self, name: str) -> None:
        """Write the messages to a file that does not exist yet."""
        if not name:
            print("/save needs the name of a file", file=sys.stderr)
            return
        try:
            with user_file(name).open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=2)
        except (OSError, ValueError) as error:
            print(f"nothing is saved: {error}", file=sys.stderr)
            return
        number = len(self.messages)
        print(f"{number} message{'' if number == 1 else 's'} saved to {name}", file=sys.stderr)

    def answer(self, text: str) -> None:
        """Write the model's answer. If Ctrl-C stops it, the conversation keeps the part so far."""
        from nanovllm.engine.requests.prompt_length import PromptTooLongError

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            with spelled_errors(SamplingParams, Config):
                (turn,) = self.llm.chat_turns(
                    [messages], self.params, chat_template_kwargs=self.chat_template_kwargs
                )
                answer, token_ids = self._write_answer(turn)
        except ValueError as error:  # the conversation is too long, or the template fails
            too_long = isinstance(error, PromptTooLongError)
            if str(error).startswith("prompts[") and not too_long:  # no conversation would work
                raise
            print(f"{error}; /reset starts a new conversation", file=sys.stderr)
            return
        # Without reasoning in its content: templates drop it.
        message = turn.answer.message(answer, token_ids)
        self.messages = [*messages, {**message, "content": message["content"] or ""}]

    def _write_answer(self, turn: "Turn") -> tuple[str, list[int]]:
        """Write an answer as it comes; return its text and tokens, as far as Ctrl-C let it come."""
        answer, token_ids, failure = "", list[int](), None
        reader, writer, pace = turn.answer.reader(), AnswerWriter(), Pace()
        try:
            with contextlib.closing(self.llm.stream([turn.prompt], turn.params)) as events:  # type: ignore[type-var]
                for event in events:
                    answer += event["text"]
                    token_ids += event["token_ids"]
                    pace.add(len(event["token_ids"]))
                    ended = event["finish_reason"] is not None
                    writer.write(reader.feed(event["text"], ended, event["token_ids"]))
                    if event["finish_reason"] == "error":
                        failure = event["stop_reason"]
            writer.end("\n")
            if failure is not None:
                print(f"the answer breaks off: {failure}", file=sys.stderr)
        except KeyboardInterrupt:
            writer.end(" ...\n")
        finally:
            writer.end("")  # a terminal does not stay dim
            pace.show()
        return answer, token_ids
