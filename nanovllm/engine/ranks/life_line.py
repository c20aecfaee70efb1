"""Starts processes that end with their caller, and lets them notice the caller's end.

A life line is a socket pair; the caller has its other end. Imported without PyTorch.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CHECK_SECONDS = 1.0  # between checks that the parent is still the caller
END_SECONDS = 30.0  # to end after the line is cut: the driver frees the GPU's memory first
HOME = str(Path(__file__).resolve().parents[3])  # the directory of this package

# What Python runs in a new process: the caller's own nanovllm, with the caller's module path.
BOOT = """
import importlib, sys
module, number = sys.argv[1], int(sys.argv[2])
arguments, sys.path[:] = sys.argv[3 : 3 + number], sys.argv[3 + number :]
import nanovllm
del sys.path[0]
importlib.import_module(module).main(*map(int, arguments))
"""


def start_process(
    module: str, arguments: tuple[int, ...], fds: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    """Run `main` of a module in a new process, which inherits `fds`.

    The caller's script is not run, and therefore needs no `if __name__ == "__main__":`.
    """
    modules = [str(Path(entry).absolute()) for entry in sys.path]
    command = [sys.executable, "-c", BOOT, module, str(len(arguments)), *map(str, arguments)]
    return subprocess.Popen(
        [*command, HOME, *modules],
        stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True,
    )  # fmt: skip


def end_with(caller: int, line: int) -> None:
    """End this process when `caller` ends, or cuts the line.

    The caller's end does not cut a line that other processes have inherited. So a thread also
    checks who the parent is.
    """
    _die_with(line)
    threading.Thread(target=_watch_parent, args=(caller,), daemon=True).start()


def _die_with(line: int) -> None:
    """Let the kernel kill this process when the line is cut, whatever it does."""
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([line], [], [], 0)[0]:  # it was cut before
        os._exit(0)


def _watch_parent(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(CHECK_SECONDS)
    os._exit(0)


def ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process ended that has cut its line, in one line of text."""
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
