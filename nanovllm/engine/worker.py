"""A rank other than 0: a process that does what rank 0's messages say, and ends with the caller.

It runs nothing of the caller's script, which therefore needs no `if __name__ == "__main__":`.
PyTorch is imported late: first of all, the process must hear when the caller dies.
"""

import fcntl
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback

from nanovllm.engine.ranks.errors import ExchangeError

# What Python runs in the new process: with the caller's modules, and the caller's very nanovllm.
BOOT = """
import sys
sys.path[:] = sys.argv[8:]
import nanovllm
del sys.path[0]
from nanovllm.engine.worker import main
main()
"""
CHECK_SECONDS = 1.0  # how often to look whether the parent is still the same


def main() -> None:
    """Serve as the rank that the arguments name, to the end."""
    caller, rank, size, ring, bell, line, place = map(int, sys.argv[1:8])
    life_line = socket.socket(fileno=line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to act on
    _die_with(line)
    threading.Thread(target=_watch_parent, args=(caller,), daemon=True).start()
    try:
        _serve(rank, size, ring, bell, place, life_line)
    except BaseException as error:
        _report(
            life_line,
            error=traceback.format_exception_only(error)[-1].strip().splitlines()[0],
            traceback=traceback.format_exc(),
            time=time.monotonic(),
            is_exchange=isinstance(error, ExchangeError),
        )
        os._exit(1)


def _serve(
    rank: int, size: int, ring: int, bell: int, place: int, life_line: socket.socket
) -> None:
    """Load this rank's part of the model, meet the others, and compute step after step."""
    import logging

    import torch

    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.ranks.channel import Reader
    from nanovllm.engine.ranks.codec import decode
    from nanovllm.engine.ranks.join import join

    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 says it all, once
    reader = Reader(ring, bell, rank - 1, size - 1)
    config, model_config, path, num_threads = pickle.loads(reader.receive())
    torch.set_num_threads(num_threads)
    ranks = join(rank, size, config.device, place)
    runner = ModelRunner(config, model_config, path, ranks)
    _report(life_line, ready=True)
    reader.receive()  # when all have loaded
    ranks.connect()
    runner.start()
    while message := reader.receive():
        with runner.computing():
            runner.compute(decode(message))
    runner.close()
    ranks.leave(together=True)
    os._exit(0)


def _report(life_line: socket.socket, **values: object) -> None:
    """Tell rank 0, in a line of JSON."""
    life_line.sendall(json.dumps(values).encode() + b"\n")


def _die_with(line: int) -> None:
    """Let the kernel kill this process when rank 0 cuts the line, whatever it is busy with then."""
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([line], [], [], 0)[0]:  # it was cut before
        os._exit(0)


def _watch_parent(caller: int) -> None:
    """End this process after the caller: of a line that others inherited its end says nothing."""
    while os.getppid() == caller:
        time.sleep(CHECK_SECONDS)
    os._exit(0)
