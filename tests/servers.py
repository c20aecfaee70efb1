"""Servers in processes of their own, as users start them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zygote
from waiting import LIMIT, wait_until

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--cpu-kvcache-gib", "0.05")


class Server:
    """`nanovllm serve`, ready to answer at `url`."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        place = () if "--uds" in arguments else ("--port", "0")
        command = [sys.executable, "-m", "nanovllm", "serve", *place, *OPTIONS, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        self.url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        def address() -> re.Match[str] | None:
            text = self.text
            assert self.process.poll() is None, text
            return re.search(r" at (\S+)\n", text)

        found = wait_until("the server does not start", address)
        assert found is not None
        return found[1]

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text()

    def line_with(self, words: str) -> str:
        """The only line that has these words. It is written after the response."""
        (line,) = wait_until(
            f"the log has no line with {words!r}",
            lambda: [one for one in self.text.splitlines() if words in one],
        )
        return line

    def children(self) -> list[int]:
        """The processes that it has started: the engine's."""
        return zygote.children(self.process.pid)

    def end(self) -> int:
        """Ask it to end; returns its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT)


@contextlib.contextmanager
def serving(log: Path, *arguments: str) -> Iterator[Server]:
    """A server for the time of the block, which leaves nothing behind."""
    server = Server(log, *arguments)
    children = server.children()
    try:
        yield server
    finally:
        if server.process.poll() is None and server.end() != 0:
            raise AssertionError(server.text)
        wait_until(
            "the engine's process is left",
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in children),
        )
