"""A rank other than 0: a process that computes the steps that rank 0 sends, and ends with it.

It runs nothing of the caller's script, which therefore needs no `if __name__ == "__main__":`.
PyTorch is imported late: the process must first be able to notice the end of its caller.
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

CHECK_SECONDS = 1.0  # between checks that the parent is still the caller


def main() -> None:
    """Serve as the rank that the arguments name, until rank 0 ends it."""
    caller, rank, size, ring, bell, line, address = map(int, sys.argv[1:8])
    life_line = socket.socket(fileno=line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    _die_with(line)
    threading.Thread(target=_watch_parent, args=(caller,), daemon=True).start()
    try:
        _serve(rank, size, ring, bell, address, life_line)
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
    rank: int, size: int, ring: int, bell: int, address: int, life_line: socket.socket
) -> None:
    """Load this rank's part of the model, connect to the others, and compute step after step."""
    import logging

    import torch

    from nanovllm.engine.placement import resolve_placement
    from nanovllm.engine.ranks.channel import Reader
    from nanovllm.engine.ranks.codec import decode
    from nanovllm.engine.ranks.join import join
    from nanovllm.engine.startup import load_shard, start_shard

    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 logs the rest, once
    reader = Reader(ring, bell, rank - 1, size - 1)
    config, model_config, path, num_threads, source = pickle.loads(reader.receive())
    torch.set_num_threads(num_threads)
    ranks = join(rank, size, config.device, address)
    placement = resolve_placement(config, model_config, ranks)
    shard = load_shard(config, model_config, path, placement, source=source)
    _report(life_line, ready=True)
    reader.receive()  # when all have loaded
    ranks.connect()
    start_shard(shard, config)
    while message := reader.receive():
        inputs = decode(message)
        with shard.computing():
            if inputs.catches_up:
                shard.catch_up(inputs)
            else:
                shard.compute(inputs)
    shard.close()
    ranks.leave(together=True)
    os._exit(0)


def _report(life_line: socket.socket, **values: object) -> None:
    """Send rank 0 a line of JSON."""
    life_line.sendall(json.dumps(values).encode() + b"\n")


def _die_with(line: int) -> None:
    """Let the kernel kill this process when rank 0 cuts the line, whatever it is doing then."""
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([line], [], [], 0)[0]:  # it was cut before
        os._exit(0)


def _watch_parent(caller: int) -> None:
    """End this process after the caller. A line that other processes inherited is not cut then."""
    while os.getppid() == caller:
        time.sleep(CHECK_SECONDS)
    os._exit(0)
