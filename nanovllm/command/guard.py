"""Run a command: its errors become a message on stderr and an exit status.

0 is success, 1 a failure, 2 a mistake in the command line, 130 Ctrl-C, 141 a closed pipe at stdout.
"""

import argparse
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import IO

from nanovllm.command import interrupts
from nanovllm.command.options import UsageError
from nanovllm.command.parser import USAGE
from nanovllm.command.spelling import spelled
from nanovllm.config import Config
from nanovllm.utils.log import log_to_stderr

BROKEN_PIPE = 141


class ClosedStdout(io.TextIOBase):
    """The stdout of a command for which the caller has closed it (`>&-`): it takes no text."""

    def __init__(self, holder: IO[str]) -> None:
        self._holder = holder  # of the file descriptor

    def write(self, text: str, /) -> int:
        del text
        raise OSError("stdout is closed")


def prepare_streams() -> None:
    """Replace streams that the caller has closed; let stdout take any text.

    Their file descriptors are used, so that no other file gets them. Without stdin there is no
    input, and without stderr messages are lost, but a result that cannot be written is a failure.
    """
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            nothing = open(os.devnull, mode)  # noqa: PTH123, SIM115
            setattr(sys, name, ClosedStdout(nothing) if name == "stdout" else nothing)
    if isinstance(sys.stdout, io.TextIOWrapper):  # otherwise some texts would be errors
        sys.stdout.reconfigure(errors="backslashreplace")


def run_guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command and return its status; an error becomes a message on stderr."""
    if args.verbose or "NANOVLLM_LOG" not in os.environ:
        handler = log_to_stderr(logging.INFO if args.verbose else logging.WARNING)
        handler.addFilter(_with_flags)
    try:
        status = run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        interrupts.report(*interrupt.args)
        return interrupts.INTERRUPTED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(f"nanovllm: error: {_message(error)}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else 1
    return status


def _with_flags(record: logging.LogRecord) -> bool:
    """Write the names of the engine's options in a record as flags; True: it is logged."""
    record.msg, record.args = spelled(record.getMessage(), Config), ()
    return True


def _message(error: Exception) -> str:
    """An error in one line, with its type unless it is an error that users can act on.

    Bad input may take more lines: they show the place in a grammar or a file.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and ".json: " in text):
        return text  # the file has a value of a wrong type
    first, _, rest = text.partition("\n")
    expected = isinstance(error, UsageError | OSError | MemoryError | RuntimeError)
    name = "" if expected else f"{type(error).__name__}: "
    return f"{name}{first}" + (" (--debug shows more)" if rest or name else "")
