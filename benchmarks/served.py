"""A server of the embedded model in processes of its own, for benchmarks that ask it for much."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanovllm.bench.serve.client import Address, Client

START_SECONDS = 120
OPTIONS = ("--device", "cpu", "--cpu-kvcache-gib", "0.2", "--host", "127.0.0.1", "--port", "0")


class Served:
    """`nanovllm serve`, its log, and what its processes use."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process, self._log = process, log
        self.address = Address.parse(self._find(r" at (http://\S+)\n"))
        self.client = Client(self.address)

    @property
    def log(self) -> str:
        """What the server has written."""
        return self._log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended by itself."""
        return self._process.poll() is not None

    def processes(self) -> list[int]:
        """The server's process and the engine's."""
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]

    def memory_mib(self) -> float:
        """The memory of both processes: resident, without what they share with others."""
        return sum(_kib(pid, "RssAnon") + _kib(pid, "RssShmem") for pid in self.processes()) / 1024

    def num_files(self) -> int:
        """How many files and sockets both processes have open."""
        return sum(len([*Path(f"/proc/{pid}/fd").iterdir()]) for pid in self.processes())

    def num_threads(self) -> int:
        """How many threads both processes have."""
        return sum(len([*Path(f"/proc/{pid}/task").iterdir()]) for pid in self.processes())

    def _find(self, pattern: str) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and not self.has_ended:
            if found := re.search(pattern, self.log):
                return found[1]
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start: {self.log}")


@contextmanager
def served(model: str, log: Path, *options: str, cpus: str | None = None) -> Iterator[Served]:
    """A server that runs during the block, on these `cpus` alone, such as "0,1"."""
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", model, *OPTIONS, *options]
    if cpus is not None:
        command = ["taskset", "-c", cpus, *command]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield Served(process, log)
    finally:
        process.terminate()
        process.wait()


def _kib(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) if found else 0
