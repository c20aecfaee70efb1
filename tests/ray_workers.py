"""Workers of Ray, forked from a process that has imported what all of them need.

A worker would import Ray, PyTorch and nanovllm for four seconds. With `warm_workers` a raylet runs
this file where it would run Ray's `setup_worker.py`: it passes its command, variables and streams
to the process that has the imports, and waits for the fork. Either ends with the other.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADDRESS = "NANOVLLM_TESTS_RAY_WORKERS"  # the variable with the path of the process's socket
PRELOADED = ("pyarrow.parquet", "pandas", "starlette", "fastapi", "uvicorn")
# Imported with the variables of the first worker: Ray's C++ code keeps what it reads then, such as
# the numbers of the raylet and of the job, of which a cluster has one.
IMPORTED_FIRST = (
    "ray.data", "ray.serve", "ray._private.workers.default_worker",
    "ray.serve._private.controller", "ray.serve._private.proxy", "ray.serve._private.replica",
    "nanovllm.ray.data", "nanovllm.ray.serve", "nanovllm.engine.remote.loop",
)  # fmt: skip


@contextlib.contextmanager
def warm_workers(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which raylets get forked workers, for the time of the block."""
    path = str(folder / "workers")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]):
            listener.close()
            yield {ADDRESS: path}  # then its stdin is closed, which ends it


# In what a raylet runs


def ask(address: str, arguments: list[str]) -> int:
    """Let a worker be forked; returns its status when it has ended."""
    options = dict(one.partition("=")[::2] for one in arguments if one.startswith("--"))
    if json.loads(options.get("--serialized-runtime-env-context") or "{}"):
        from ray._private.workers import setup_worker

        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])
    known = ("--language=", "--serialized-runtime-env-context=")
    request = {
        "argv": [sys.executable, *(one for one in arguments if not one.startswith(known))],
        "pass_fds": [],
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "new_session": False,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "starts_others": True,
    }
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data) + 4096)
        link.connect(address)
        socket.send_fds(link, [data], [0, 1, 2])
        return int(link.recv(20) or 1)


# In the process that forks


class Worker(NamedTuple):
    """A fork, and the connection to the process that asked for it."""

    fd: int  # refers to the fork
    link: socket.socket


def serve(listener: socket.socket) -> None:
    """Fork a worker for each process that asks, until stdin ends; raises `Born` in each."""
    from zygote import Born

    workers: dict[int, Worker] = {}  # by the file descriptors that tell of an end
    poll = select.poll()
    for fd in (0, listener.fileno()):
        poll.register(fd, select.POLLIN)
    while True:
        ((fd, _), *_) = poll.poll()
        if fd == 0:
            os._exit(0)
        elif fd == listener.fileno():
            link = listener.accept()[0]
            data, fds, *_ = socket.recv_fds(link, 1 << 20, 3)
            request = json.loads(data)
            import_first(request["environment"])
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                for one in (listener, link, *(worker.link for worker in workers.values())):
                    one.close()
                raise Born({**request, "parent": parent}, fds)
            for one in fds:
                os.close(one)
            worker = Worker(os.pidfd_open(pid), link)
            for one in (worker.fd, link.fileno()):
                poll.register(one, select.POLLIN)
                workers[one] = worker
        elif fd == workers[fd].fd:  # the worker has ended
            worker = workers.pop(fd)
            ended = os.waitid(os.P_PIDFD, fd, os.WEXITED)
            poll.unregister(fd)
            os.close(fd)
            if workers.pop(worker.link.fileno(), None):
                poll.unregister(worker.link)
                with contextlib.suppress(OSError):
                    worker.link.send(str(ended.si_status).encode())
                worker.link.close()
        else:  # the process that asked has
            worker = workers.pop(fd)
            signal.pidfd_send_signal(worker.fd, signal.SIGKILL)
            poll.unregister(fd)
            worker.link.close()


def import_first(environment: dict[str, str]) -> None:
    """Import Ray, if it has not been, with a worker's variables."""
    if "ray" in sys.modules:
        return
    os.environ.update(environment)
    import ray
    import zygote

    ids = ray.actor.ActorClassID
    ray.actor.ActorClassID = types.SimpleNamespace(
        from_random=lambda: ids(os.urandom(ids.size()))  # its own would seed Ray's generator
    )
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    ray.actor.ActorClassID = ids
    if random_id() == random_id():
        raise RuntimeError("Ray's random numbers would be the same in all workers")
    ray._raylet.setproctitle = lambda title: zygote.entitle([title])  # its own finds no room
    gc.collect()
    gc.freeze()


def random_id() -> bytes:
    """An identifier of Ray from a fork's generator."""
    import ray

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, ray.WorkerID.from_random().binary())
        os._exit(0)
    os.waitpid(pid, 0)
    found = os.read(reader, 100)
    for fd in (reader, writer):
        os.close(fd)
    return found


def main() -> None:
    """Import what workers need, and fork them."""
    import zygote

    path, environment = sys.path[1:], zygote.early_environment(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    zygote.fork_forever(serve, socket.socket(fileno=int(sys.argv[1])), path, environment)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(os.environ[ADDRESS], sys.argv[1:]))
    main()
