"""Ctrl-C at any moment: status 130 and one line, from the first line of `main` on.

It costs more than 20 seconds: commands start cold, to be interrupted at many moments.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import selection
from waiting import LIMIT, wait_until

LINE = "nanovllm: interrupted\n"
MODULE = ["-m", "nanovllm"]
SCRIPT = ["-c", "import sys; from nanovllm.command.main import main; sys.exit(main())"]
COMMANDS = {
    "generate": [*MODULE, "generate", "12+34=", "7+8="],
    "chat": [*MODULE, "chat"],
    "run-batch": [*MODULE, "run-batch", "in", "-o", "out"],
    "info": [*MODULE, "info"],
    "bench": [*MODULE, "bench", "--shape", "qwen3-42m", "--num-seqs", "2"],
    "the script": [*SCRIPT, "generate", "12+34="],
    "two ranks": [
        *MODULE, "generate", "1", "2", "--ignore-eos", "--max-tokens", "4000",
        "--tensor-parallel-size", "2", "--device", "cpu",
    ],
}  # fmt: skip

# Python runs it before the command: it reports the import that follows the handler.
SITE = """
import os, sys
class Reporter:
    def find_spec(self, name, *_):
        if name == "nanovllm.command.guard":
            os.write({fd}, b"x")
sys.meta_path.insert(0, Reporter())
"""


class Ended(NamedTuple):
    """A process that has ended: its status, and what it wrote, together."""

    status: int
    text: str


class Striker:
    """Starts commands in a folder of their own, and interrupts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        (folder / "in").write_text('{"prompt": "1+1=", "max_tokens": 4}\n' * 9)
        self.begun, self._its_end = os.pipe()
        (folder / "sitecustomize.py").write_text(SITE.format(fd=self._its_end))
        paths = [str(folder), str(Path(__file__).parents[2])]
        self.env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm",
            "OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch),
        }  # fmt: skip

    def close(self) -> None:
        os.close(self._its_end)
        os.close(self.begun)

    def strike(
        self, argv: list[str], delay: float, in_terminal: bool, shown: str | None = None
    ) -> Ended:
        """Interrupt the command `delay` seconds after the first line of `main`, or after `shown`
        has appeared.
        """
        reader, writer = pty.openpty() if in_terminal else os.pipe()
        if in_terminal:
            fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=self.folder, env=self.env, stdout=writer, stderr=writer,
            stdin=writer if in_terminal else subprocess.PIPE, pass_fds=(self._its_end,),
            start_new_session=True, preexec_fn=default_interrupts,
        )  # fmt: skip
        os.close(writer)
        assert select.select([self.begun], [], [], LIMIT)[0], "the command does not start"
        os.read(self.begun, 1)
        if shown is not None:
            read_until(reader, shown)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        text = messages(read_until(reader, None))
        os.close(reader)
        if process.stdin is not None:
            process.stdin.close()
        return Ended(process.wait(LIMIT), text)


def default_interrupts() -> None:
    """Handle SIGINT in the new process, also where the tests' own process ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(descriptor: int, pattern: str | None) -> str:
    """Read until `pattern` has appeared, or until the other end is closed."""
    text, end = "", time.monotonic() + LIMIT
    with contextlib.suppress(OSError):  # a terminal without a process
        while pattern is None or re.search(pattern, text) is None:
            assert select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0], text
            if not (data := os.read(descriptor, 1 << 16)):
                break
            text += data.decode(errors="replace")
    return text


def messages(text: str) -> str:
    """A terminal's text without progress bars, and without what the line replaces."""
    plain = re.sub(r"[^\n]*\x1b\[K", "", text.replace("\r\n", "\n"))
    return re.sub(r"[^\n]*\d%\|[^\n]*\n", "", plain)


@pytest.fixture
def striker(tmp_path: Path) -> Any:
    striker = Striker(tmp_path)
    yield striker
    striker.close()


def processes_in(folder: Path) -> list[str]:
    """The processes whose working directory is `folder`: the command and its other ranks."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                found.append(link.parent.name)
    return found


@pytest.mark.parametrize("in_terminal", [False, True])
def test_an_import_is_interrupted(striker: Striker, in_terminal: bool) -> None:
    """PyTorch swallows a KeyboardInterrupt while it imports NumPy, and fails later."""
    for delay in (0.0, 0.5):
        assert striker.strike(COMMANDS["generate"], delay, in_terminal) == (130, LINE)


@pytest.mark.slow
def test_a_running_command_is_interrupted(striker: Striker) -> None:
    """With one line too: a batch job says how to go on."""
    many = ["--ignore-eos", "--max-tokens", "4000", "--max-model-len", "4096"]
    argv = [*MODULE, "generate", "1", "2", *many]
    assert striker.strike(argv, 0.3, True, shown="Generating: ") == (130, LINE)
    argv = [*MODULE, "run-batch", "in", "-o", "out", *many]
    (striker.folder / "in").write_text('{"prompt": "1", "max_tokens": 4000}\n' * 9)
    stopped = "stopped; the same command resumes here\n"
    assert striker.strike(argv, 0.3, True, shown="Batch: ") == (130, stopped)
    argv = [*MODULE, "generate", "1", *many]
    status, text = striker.strike(argv, 0.1, True, shown=r"\n\d")
    assert status == 130 and re.fullmatch(rf".+\n{LINE}", text, re.DOTALL), "the answer stays"


def test_only_the_process_of_the_command_has_the_handler(capsys: Any) -> None:
    """Neither the package nor a call of `main` changes what Ctrl-C does."""
    script = (
        "import signal\nbefore = signal.getsignal(signal.SIGINT)\n"
        "import nanovllm, nanovllm.command.interrupts\nfrom nanovllm.command.main import main\n"
        "nanovllm.SamplingParams()\ntry: main(['--version'])\nexcept SystemExit: pass\n"
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)


def test_an_ignored_signal_stays_ignored() -> None:
    """As in a job that a script starts in the background."""
    script = (
        "import signal, sys\nfrom nanovllm.command import interrupts\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\ninterrupts.take_over()\n"
        "signal.raise_signal(signal.SIGINT)\nwith interrupts.Interruptible():\n"
        "    signal.raise_signal(signal.SIGINT)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)


def test_the_status_is_130_if_the_line_cannot_be_written() -> None:
    """Ctrl-C ends all of `nanovllm ... 2>&1 | tee log`; writing the line is then an error."""
    script = (
        "import os, sys\nfrom nanovllm.command.guard import run_guarded\n"
        "from nanovllm.command.parser import make_parser\n"
        "reader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 2)\n"
        "def run(args): raise KeyboardInterrupt\n"
        "sys.exit(run_guarded(run, make_parser().parse_args(['chat'])))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=LIMIT).returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_moment_of_the_start_is_interrupted(striker: Striker, name: str) -> None:
    """With pipes and in a terminal; nothing is left behind. Several ranks take some seconds."""
    span = 5.0 if name == "two ranks" else 1.0
    for index in selection.sample(range(12), 1 / 3, name):
        delay = index / 12 * span
        ended = striker.strike(COMMANDS[name], delay, in_terminal=index % 2 == 1)
        assert ended == (130, LINE), f"after {delay:.2f} s"
    wait_until("a rank is left", lambda: not processes_in(striker.folder))
    assert list(striker.scratch.iterdir()) == []
    output = striker.folder / "out"
    assert not output.exists() or output.stat().st_size
