"""A rank other than 0: a process that runs the steps and commands of rank 0, and ends with it.

The caller's script is not run here, and therefore needs no `if __name__ == "__main__":`.
PyTorch is imported late: the process must first be able to notice the end of its caller.
"""

import json
import os
import pickle
import signal
import socket
import time
import traceback

from nanovllm.engine.errors import ExchangeError
from nanovllm.engine.ranks.life_line import end_with


def main(
    caller: int, rank: int, size: int, ring: int, bell: int, line: int, answers: int, address: int
) -> None:
    """Serve as this rank, until rank 0 ends it."""
    life_line = socket.socket(fileno=line)
    link = socket.socket(fileno=answers)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    end_with(caller, line)
    try:
        _serve(rank, size, ring, bell, address, life_line, link)
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
    rank: int, size: int, ring: int, bell: int, address: int, life_line: socket.socket,
    link: socket.socket,
) -> None:  # fmt: skip
    """Load this rank's part of the model, connect to the others, and compute step after step.

    Between steps it runs commands, and sends their results.
    """
    import logging

    import torch

    from nanovllm.engine.ranks.answers import attempt, send
    from nanovllm.engine.ranks.channel import Reader
    from nanovllm.engine.ranks.codec import decode, unpack
    from nanovllm.engine.ranks.join import join
    from nanovllm.engine.start.placement import resolve_placement
    from nanovllm.engine.start.startup import load_shard, start_shard

    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 logs the rest, once
    reader = Reader(ring, bell, rank - 1, size - 1)
    config, model_config, path, num_threads, parts = pickle.loads(reader.receive())
    torch.set_num_threads(num_threads)
    ranks = join(rank, size, config.device, address, one_order=config.batch_invariant)
    placement = resolve_placement(config, model_config, ranks)
    shard = load_shard(config, model_config, path, placement, parts=parts)
    _report(life_line, ready=True)
    reader.receive()  # comes when all have loaded
    ranks.connect()
    start_shard(shard, config)
    while message := reader.receive():
        if (command := unpack(message)) is not None:
            send(link, attempt(command, shard))
            continue
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
