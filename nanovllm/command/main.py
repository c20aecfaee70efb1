"""The entry point: select a subcommand, and turn errors into one line and an exit status.

0 is success, 1 a failure, 2 a mistake in the command line, 130 Ctrl-C, 141 a closed pipe at stdout.
"""

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from nanovllm import __version__
from nanovllm.command import bench, chat, generate, info, run_batch
from nanovllm.command.options import UsageError

COMMANDS = (generate, chat, run_batch, info, bench)
USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


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


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # instead of failing at some texts
        sys.stdout.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args(argv)
    return run_guarded(args.run, args)


def run_guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command and return its status; an error becomes one line on stderr."""
    _set_up_logging(args.verbose)
    try:
        status = run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(f"nanovllm: error: {_one_line(error)}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else 1
    return status


def _one_line(error: Exception) -> str:
    """An error in one line, with its type unless it is an error that users can act on."""
    first, _, rest = (str(error) or type(error).__name__).partition("\n")
    expected = isinstance(error, UsageError | OSError | ValueError | MemoryError | RuntimeError)
    name = "" if expected else f"{type(error).__name__}: "
    return f"{name}{first}" + (" (--debug shows more)" if rest or name else "")


def _set_up_logging(verbose: bool) -> None:
    """Log warnings to stderr, and with `verbose` everything that the engine logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nanovllm: %(message)s"))
    logger = logging.getLogger("nanovllm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
