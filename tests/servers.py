"""Servers in processes of their own, as users start them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zygote

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--cpu-kvcache-gib", "0.05")
START_SECONDS = 120
LOG_SECONDS = 60


class Server:
    """`nanovllm serve`, ready to answer at `url`."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *OPTIONS, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        self.url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r" at (\S+)\n", self.text)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return found[1]

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text()

    def line_with(self, words: str) -> str:
        """The only line that has these words. It is written after the response."""
        deadline = time.monotonic() + LOG_SECONDS
        while not (lines := [one for one in self.text.splitlines() if words in one]):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)
        (line,) = lines
        return line

    def children(self) -> list[int]:
        """The processes that it has started: the engine's."""
        return zygote.children(self.process.pid)

    def end(self) -> int:
        """Ask it to end; returns its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


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
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline, "the engine's process is left"
            time.sleep(0.02)
