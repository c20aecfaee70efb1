"""A rank other than 0: a process that does what rank 0's messages say, and ends with the caller.

It runs nothing of the caller's script, which therefore needs no `if __name__ == "__main__":`.
PyTorch is imported late: first of all, the process must hear when the caller dies.
"""

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

# What Python runs in the new process. Modules are found where the caller finds them.
BOOT = "import sys; sys.path[:] = sys.argv[7:]; from nanovllm.engine.worker import main; main()"
CHECK_SECONDS = 1.0  # how often to look whether the parent is still the same


def main() -> None:
    """Serve as the rank that the arguments name, to the end."""
    rank, size, ring, bell, line, port = map(int, sys.argv[1:7])
    life_line = socket.socket(fileno=line)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to act on
    threading.Thread(target=_end_with_caller, args=(life_line, os.getppid()), daemon=True).start()
    try:
        _serve(rank, size, ring, bell, port, life_line)
    except BaseException as error:
        _report(
            life_line,
            traceback=traceback.format_exc(),
            time=time.monotonic(),
            is_exchange=type(error).__name__ == "ExchangeError",
        )
        os._exit(1)


def _serve(rank: int, size: int, ring: int, bell: int, port: int, life_line: socket.socket) -> None:
    """Load this rank's part of the model, meet the others, and compute step after step."""
    import logging

    import torch

    from nanovllm.engine.channel import Reader
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.process_ranks import ProcessRanks, find_store
    from nanovllm.engine.step_codec import StepCodec

    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 says it all, once
    reader = Reader(ring, bell, rank - 1, size - 1)
    config, model_config, path, num_threads = pickle.loads(reader.receive())
    torch.set_num_threads(num_threads)
    ranks = ProcessRanks(rank, size)
    runner = ModelRunner(config, model_config, path, ranks)
    _report(life_line, ready=True)
    ranks.connect(runner.device, find_store(port, size))
    runner.start()
    codec = StepCodec()
    while True:
        runner.compute(codec.decode(reader.receive()))


def _report(life_line: socket.socket, **values: object) -> None:
    """Tell rank 0, in a line of JSON."""
    life_line.sendall(json.dumps(values).encode() + b"\n")


def _end_with_caller(life_line: socket.socket, caller: int) -> None:
    """End this process when rank 0 cuts the line, or when the caller is not the parent any more."""
    poll = select.poll()
    poll.register(life_line, select.POLLIN)
    while os.getppid() == caller and not poll.poll(CHECK_SECONDS * 1e3):
        pass
    os._exit(0)
