"""The parser of the command line: a mistake is one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nanovllm import __version__
from nanovllm.command import bench, bench_serve, chat, generate, info, quantize, run_batch, serve
from nanovllm.command.field_options import AppendPairs, flags_for_pairs
from nanovllm.command.groups import common_first
from nanovllm.command.other_flags import add_other_flags
from nanovllm.command.served_names import FLAG, flags_for_names, names_hint
from nanovllm.utils.checks import did_you_mean

COMMANDS = (generate, chat, serve, run_batch, info, quantize, bench, bench_serve)
USAGE = 2  # the exit status of a mistake in the command line


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with the name that is likely meant."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Refuse unknown arguments here, because this parser knows the subcommand's options."""
        actions = self._option_string_actions.items()
        flags = [flag for flag, action in actions if isinstance(action, AppendPairs)]
        args = flags_for_pairs(sys.argv[1:] if args is None else args, flags)
        if FLAG in self._option_string_actions:
            args = flags_for_names(args, self._takes_text)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            hints = (did_you_mean(flag, self._option_string_actions) for flag in flags)
            hint = next(filter(None, hints), "" if flags else names_hint(args))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def _takes_text(self, flag: str) -> bool:
        """Whether an option has a text after it."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs != 0

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), list(action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"nanovllm: error: {message} (see {self.prog} --help)\n")


class CommandLine(Parser):
    """The parser of the whole command line, in which a command may have two words."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Take the words of a command as one argument."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(join_words(given), namespace)  # type: ignore[no-untyped-call]


def join_words(args: Sequence[str]) -> list[str]:
    """The arguments, with the words of a command such as `bench serve` as one of them."""
    start = next((i for i, arg in enumerate(args) if not arg.startswith("-")), len(args))
    words = " ".join(args[start : start + 2])
    is_command = words in (command.NAME for command in COMMANDS)
    return [*args[:start], words, *args[start + 2 :]] if is_command else list(args)


def make_parser() -> Parser:
    """The parser of the command line, with the arguments of all subcommands."""
    parser = CommandLine(
        prog="nanovllm",
        description="Inference of large language models: in batches, chats and a server.",
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    add_common_arguments(parser, False)
    subparsers = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", parser_class=Parser
    )
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.SUMMARY, description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        add_common_arguments(subparser, argparse.SUPPRESS)
        command.add_arguments(subparser)
        finish(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def finish(parser: argparse.ArgumentParser) -> None:
    """Order the help of a command that has all its arguments, and let it take vLLM's flags.

    The usage would list every option.
    """
    add_other_flags(parser)
    common_first(parser)
    places = " ".join(
        f"[{action.metavar}]" if action.nargs == "?" else f"{action.metavar}"
        for action in parser._get_positional_actions()
    )
    parser.usage = f"%(prog)s [OPTION ...] {places}".rstrip()


def add_common_arguments(parser: argparse.ArgumentParser, default: object) -> None:
    """Add the arguments that are accepted before and after the subcommand."""
    for flags, text in (
        (("-v", "--verbose"), "log what the engine does to stderr"),
        (("--debug",), "show tracebacks"),
    ):
        parser.add_argument(*flags, action="store_true", default=default, help=text)
