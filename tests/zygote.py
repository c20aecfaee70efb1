"""Python processes that start in milliseconds: forked from one that has PyTorch imported.

Tests start hundreds of processes (ranks, servers, commands, scripts), and each would import
PyTorch and transformers for seconds. `install` puts a `subprocess.Popen` in place that asks a
zygote instead: a process that has imported what all of them need, nothing of nanovllm, and forks.
The new process is a child of the process that asked, with the arguments, files, environment and
directory that it would have had. A child that may start processes itself gets a zygote of its own,
forked from it before it runs anything.

What a fork could not imitate starts as always: other programs, other interpreter options, an
environment that differs in what libraries read when they are imported, `preexec_fn`. So do all
processes in tests marked `cold`, and in every test if $NANOVLLM_TESTS_COLD is set. Two differences
are left: what libraries print when they are imported is not seen, and all forks of a zygote hash
strings alike.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch", "numpy", "safetensors.torch", "tokenizers", "tqdm", "xxhash", "transformers",
    "transformers.models.auto.tokenization_auto", "transformers.models.auto.configuration_auto",
    "huggingface_hub", "asyncio", "concurrent.futures", "multiprocessing",
)  # fmt: skip
# Read when a library or Python itself starts: a fork keeps the zygote's.
READ_EARLY = (
    "ATEN_", "CUDA_", "DNNL_", "GOMP_", "HF_", "HOME", "KMP_", "LD_", "LRU_CACHE", "MALLOC_",
    "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TOKENIZERS_",
    "TORCH_", "TQDM_", "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
NOT_EARLY = (
    "PYTHONBREAKPOINT",  # read by `breakpoint`; Ray sets it
    "PYTHONUNBUFFERED",  # which the child's output follows
)
NAME = b"zygote"  # in /proc/PID/comm
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
ENDS = (
    "nanovllm.engine.ranks.worker",
    "nanovllm.engine_main",
)  # modules that start no others
FIRST_FD = 500  # where the zygote keeps files, above those that children get

_libc = ctypes.CDLL(None)


def install() -> None:
    """Start a zygote, and let `subprocess.Popen` fork from it where that makes no difference."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        os.set_inheritable(its.fileno(), True)
        subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())], stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )  # fmt: skip
    _connect(ours, early_environment(os.environ))


def _connect(link: socket.socket, environment: dict[str, str]) -> None:
    Popen.link, Popen.environment, Popen.owner = link, environment, os.getpid()
    subprocess.Popen = Popen  # type: ignore[misc]


def early_environment(environment: Any) -> dict[str, str]:
    """The variables that a fork cannot change any more."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_EARLY) and name not in NOT_EARLY
    }


def children(pid: int) -> list[int]:
    """The children of a process, zombies among them, without its zygote."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name, _, fields = file.read_text().partition(" (")[2].rpartition(") ")
            if int(fields.split()[1]) == pid and name != NAME.decode():
                found.append(int(file.parent.name))
    return found


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Inside the block all processes start as always."""
    before, Popen.is_cold = Popen.is_cold, True
    try:
        yield
    finally:
        Popen.is_cold = before


# Python's own: a process that was forked has the `Popen` of its zygote's module in its place.
Cold: Any = next(kind for kind in subprocess.Popen.__mro__ if kind.__module__ == "subprocess")


class Popen(Cold):  # type: ignore[misc]
    """A process, forked from a zygote if it is Python and a fork can imitate it."""

    link: socket.socket
    environment: dict[str, str]
    owner = 0
    is_cold = False
    _lock = threading.Lock()

    def _execute_child(self, *args: Any) -> None:
        start = super()._execute_child
        asked = inspect.signature(start).bind(*args).arguments
        request = None if self.is_cold or self.owner != os.getpid() else self._request(asked)
        if request is None:
            start(*args)
            return
        streams = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        fds = [fd if fd >= 0 else number for number, fd in enumerate(streams)]
        with self._lock:
            self.pid = self._fork(request, [*fds, *asked["pass_fds"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))

    def _request(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """What the zygote must know, or None where a fork would not be the same."""
        argv = asked["args"]
        if isinstance(argv, (str, bytes, os.PathLike)) or len(argv) < 2:
            return None
        argv = [os.fspath(arg) for arg in argv]
        unusual = ("preexec_fn", "shell", "gid", "gids", "uid", "creationflags", "startupinfo")
        if any(asked.get(name) for name in unusual) or not asked["close_fds"]:
            return None
        if asked.get("process_group", -1) not in (None, -1) or asked.get("umask", -1) >= 0:
            return None
        if argv[0] != sys.executable or asked["executable"] not in (None, argv[0]):
            return None
        if argv[1].startswith("-") and (argv[1] not in ("-c", "-m") or len(argv) < 3):
            return None
        if not argv[1].startswith("-") and not argv[1].endswith(".py"):
            return None
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        if not all(isinstance(part, str) for item in environment.items() for part in item):
            return None
        if early_environment(environment) != self.environment:
            return None
        try:
            here = str(Path.cwd())
        except FileNotFoundError:
            return None
        cwd = here if asked["cwd"] is None else str(Path(here, os.fspath(asked["cwd"])))
        if not Path(cwd).is_dir() or any(fd >= FIRST_FD for fd in asked["pass_fds"]):
            return None
        return {
            "argv": argv,
            "pass_fds": list(asked["pass_fds"]),
            "cwd": cwd,
            "environment": environment,
            "new_session": bool(asked["start_new_session"]),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "starts_others": not set(ENDS) & set(argv),
            "parent": os.getpid(),
        }

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """The new process's number, once it is our child."""
        data = json.dumps(request).encode()
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data) + 4096)
        # An interrupt in between would leave the answer to the next request.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.link, [data], fds)
            answer = self.link.recv(1 << 16)
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        if not answer:
            raise RuntimeError("the zygote has ended")
        return int(answer)


# In the zygote


class Born(BaseException):
    """Leaves the zygote's loop in a process that has been forked to run something."""


def serve(link: socket.socket) -> None:
    """Fork a process for each request, until nobody can ask any more; raises `Born` in each."""
    while True:
        data, fds, *_ = socket.recv_fds(link, 1 << 20, 250)
        if not data:
            os._exit(0)
        pid_reader, pid_writer = os.pipe()
        middle = os.fork()
        if middle == 0:  # its end makes the child an orphan, which the subreaper takes
            child = os.fork()
            if child == 0:
                link.close()
                os.close(pid_reader)
                os.close(pid_writer)
                raise Born(json.loads(data), fds)
            os.write(pid_writer, str(child).encode())
            os._exit(0)
        for fd in (*fds, pid_writer):
            os.close(fd)
        os.waitpid(middle, 0)
        link.send(os.read(pid_reader, 20))
        os.close(pid_reader)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Turn this fork into the process that was asked for, except that it runs nothing yet."""
    while os.getppid() != request["parent"]:  # the fork in the middle is ending
        if not Path(f"/proc/{request['parent']}").exists():
            os._exit(0)
        time.sleep(0.0005)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FD) for fd in fds]
    os.closerange(0, FIRST_FD)
    targets = [0, 1, 2, *request["pass_fds"]]
    for fd, target in zip(kept, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    os.closerange(FIRST_FD, FIRST_FD + 1000)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["new_session"]:
        os.setsid()
    ignore = request["ignores_interrupts"]
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignore else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    name = Path(sys.executable).name.encode()[:15]
    _libc.prctl(PR_SET_NAME, name, 0, 0, 0)
    entitle(request["argv"])
    renew_streams(bool(request["environment"].get("PYTHONUNBUFFERED")))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    gc.enable()


def renew_streams(unbuffered: bool) -> None:
    """The standard streams of the files that the process has now."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8"
    )
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8",
            errors="backslashreplace" if fd == 2 else "strict",
            line_buffering=not unbuffered and (fd == 2 or raw.isatty()), write_through=unbuffered,
        )  # fmt: skip
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(argv: list[str], path: list[str]) -> None:
    """Run a command line of Python, after its name."""
    if argv[0] == "-c":
        code, sys.argv = argv[1], ["-c", *argv[2:]]
        sys.path[:] = ["", *path]
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[:] = [str(Path.cwd()), *path]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[:] = [str(Path(argv[0]).absolute().parent), *path]
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=__builtins__, __file__=argv[0])
        sys.modules["__main__"] = main
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__)


def moved(link: socket.socket) -> socket.socket:
    """The socket under a number that no process expects."""
    with link:
        return socket.socket(fileno=fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, FIRST_FD))


def entitle(argv: list[str]) -> None:
    """Show a command line as this process's, as far as there is room in the zygote's own.

    The memory after the arguments is that of variables, which `become` has set anew elsewhere.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, limit = (int(fields[index]) for index in (45, 46, 48))  # of arguments, variables
    title = " ".join(argv).encode()[: limit - start - 1]
    title = title.ljust(end - start, b"\0") if len(title) < end - start else title + b"\0"
    ctypes.memmove(start, title, len(title))


def main() -> None:
    """Import what all processes need, and fork until nobody can ask any more.

    A fork that may start processes itself has a zygote of its own.
    """
    link = moved(socket.socket(fileno=int(sys.argv[1])))
    path = sys.path[1:]
    environment = early_environment(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        _libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the group of those that ask
        try:
            serve(link)
        except Born as born:
            request, fds = born.args
        become(request, fds)
        if not request["starts_others"]:
            break
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            its.close()
            _connect(moved(ours), environment)
            break
        ours.close()
        link = moved(its)
        os.closerange(0, FIRST_FD)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
    run(request["argv"][1:], path)


if __name__ == "__main__":
    main()
