"""A process forked from the zygote is the one that would have been started."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zygote

pytestmark = pytest.mark.skipif(
    subprocess.Popen is not zygote.Popen, reason="this run starts all processes cold"
)

SHOW = """
import os, signal, sys
print(sys.argv, __name__, sys.path[0], os.getcwd(), os.environ.get("SHOWN"), sys.stdin.read())
print(sys.stdout.write_through, sys.stdout.line_buffering, sys.stderr.line_buffering)
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print(os.getpid() == os.getsid(0), [fd for fd in os.listdir("/proc/self/fd") if len(fd) == 1])
print("said", file=sys.stderr)
"""


def both(*arguments: str, **options: Any) -> list[Any]:
    """The end of a process that was forked, and of one that was not."""
    ends: list[Any] = []
    for kind in (zygote.cold, contextlib.nullcontext):
        with kind():
            ends.append(
                subprocess.run(
                    [sys.executable, *arguments],
                    capture_output=True,
                    text=True,
                    input="typed",
                    **options,
                )
            )
    return ends


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_a_fork_sees_what_a_new_process_sees(how: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    arguments = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "file": ["shown.py"]}[how]
    environment = os.environ | {"SHOWN": "yes", "PYTHONUNBUFFERED": "1"}
    new, forked = both(
        *arguments, "--an", "argument", cwd=tmp_path, env=environment, start_new_session=True
    )
    assert new.returncode == 0 and "typed" in new.stdout and "yes" in new.stdout
    assert (forked.stdout, forked.stderr) == (new.stdout, new.stderr)


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(3)", "1/0", "import os; os.abort()", "raise KeyboardInterrupt"]
)
def test_a_fork_ends_as_a_new_process_does(code: str) -> None:
    new, forked = both("-c", code)
    assert forked.returncode == new.returncode != 0
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_a_fork_is_our_child_and_a_signal_ends_it() -> None:
    code = "import os, time; print(os.getppid(), 'torch' in __import__('sys').modules, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code + "; time.sleep(600)"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == f"{os.getpid()} True\n"
        assert process.pid in zygote.children(os.getpid())
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert shown == f"{sys.executable} -c {code}; time.sleep(600)"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    assert process.pid not in zygote.children(os.getpid())


def test_a_fork_gets_the_files_that_are_passed_and_may_start_others() -> None:
    reader, writer = os.pipe()
    inner = f"import os, sys; os.write({writer}, str(os.getppid()).encode())"
    outer = (
        "import os, subprocess, sys; print(os.getpid())\n"
        f"subprocess.run([sys.executable, '-c', {inner!r}], pass_fds=[{writer}], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", outer], pass_fds=[writer], stdout=subprocess.PIPE, check=True
    )
    assert os.read(reader, 100) == done.stdout.strip()
    for fd in (reader, writer):
        os.close(fd)


def test_a_fork_has_imported_nothing_that_tests_look_for() -> None:
    """Whether a process imports these is tested by processes that are forked."""
    names = ("nanovllm", "llguidance", "triton", "torch._dynamo", "ray")
    code = f"import sys; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_what_a_fork_cannot_imitate_starts_as_always() -> None:
    code = "import sys; print('torch' in sys.modules, sys.flags.optimize)"
    command = [sys.executable, "-c", code]

    def loaded(*arguments: Any, **options: Any) -> str:
        return subprocess.run(*arguments, capture_output=True, text=True, **options).stdout.strip()

    assert loaded(command) == "True 0"
    assert loaded([sys.executable, "-O", "-c", code]) == "False 1"
    assert loaded(command, env=os.environ | {"OMP_NUM_THREADS": "7"}) == "False 0"
    assert loaded(command, preexec_fn=lambda: None) == "False 0"
    with zygote.cold():
        assert loaded(command) == "False 0"
    assert re.match(r"GNU|BSD|\w", loaded(["true", "--version"]))
