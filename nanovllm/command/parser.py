"""The parser of the command line: a mistake is one line."""

import argparse
from typing import NoReturn

from nanovllm import __version__
from nanovllm.command import bench, chat, generate, info, run_batch

COMMANDS = (generate, chat, run_batch, info, bench)
USAGE = 2  # the exit status of a mistake in the command line


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"nanovllm: error: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """The parser of the command line, with the arguments of all subcommands."""
    parser = Parser(prog="nanovllm", description="Offline inference of large language models.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    add_common_arguments(parser, False)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.SUMMARY, description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        add_common_arguments(subparser, argparse.SUPPRESS)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, default: object) -> None:
    """Add the arguments that are accepted before and after the subcommand."""
    for flags, text in (
        (("-v", "--verbose"), "log what the engine does to stderr"),
        (("--debug",), "show tracebacks"),
    ):
        parser.add_argument(*flags, action="store_true", default=default, help=text)
