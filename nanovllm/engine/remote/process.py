"""EngineProcess: starts an engine in a process of its own, and finds out how it ended."""

import contextlib
import logging
import os
import socket
import subprocess
import weakref
from collections.abc import Mapping
from typing import Any

from nanovllm.engine.errors import RankError
from nanovllm.engine.ranks.frames import frame, receive
from nanovllm.engine.ranks.life_line import ending, start_process
from nanovllm.engine.remote.messages import EngineFailed, EngineReady
from nanovllm.models.outside import registered_families

END_SECONDS = 10.0  # after which a process that has not ended is killed


class EngineProcess:
    """A process that runs the `main` of `module`, and the caller's end of the socket, `link`.

    Its messages are lists of events.
    """

    def __init__(self, module: str, model: str, options: Mapping[str, Any]) -> None:
        self.line, its_line = socket.socketpair()
        self.link, its_link = socket.socketpair()
        with its_line, its_link:
            fds = (its_line.fileno(), its_link.fileno())
            arguments = (os.getpid(), *fds)
            self._process = start_process(module, arguments, fds)
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._process, self.line, self.link
        )
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        self.link.sendall(frame((model, dict(options), level, registered_families())))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self) -> EngineReady:
        """Wait for the model to be loaded; raises what the process raised."""
        try:
            message = receive(self.link)
        except EOFError:
            error = self.failure()
            self.close()
            raise error from None
        if isinstance(message, EngineFailed):
            self.close()
            raise message.error
        assert isinstance(message, EngineReady)
        return message

    def failure(self) -> RankError:
        """The error that says why the process ended without a message."""
        return RankError(f"rank 0, the engine's process, {ending(self._process)}")

    def close(self) -> None:
        """End the process, after its step, and free what it used. Idempotent."""
        self._finalizer()


def _end(
    owner: int, process: "subprocess.Popen[bytes]", line: socket.socket, link: socket.socket
) -> None:
    if os.getpid() != owner:  # in a forked process, which has the caller's sockets
        return
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)  # the engine reads it as Quit
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    for one in (link, line):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    process.kill()
    process.wait()
