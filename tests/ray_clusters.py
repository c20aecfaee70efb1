"""The Ray cluster of all tests that need one, on this machine, and its processes.

It is started by the first of them, and ended after the last one that runs without another test in
between (`conftest.pytest_runtest_teardown`). No process may be left of it.
"""

import contextlib
import functools
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LIMIT, wait_until

NUM_CPUS = 4  # Ray does not check whether the machine has them
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15: other tests would take the cores
    "RAY_idle_worker_killing_time_threshold_ms": "3600000",  # the next test needs them
    # How long a slow machine may take:
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(LIMIT),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(LIMIT),
    "RAY_agent_register_timeout_ms": str(int(1000 * LIMIT)),
    "RAY_health_check_timeout_ms": str(int(1000 * LIMIT)),
    "RAY_worker_register_timeout_seconds": str(int(LIMIT)),
}
_running = contextlib.ExitStack()
_folder: Path | None = None


def shared_cluster() -> Path:
    """The folder of the cluster, which is started if there is none."""
    global _folder
    if _folder is None:
        _folder = _running.enter_context(_cluster())
    return _folder


def end_shared_cluster() -> None:
    """End the cluster, if there is one."""
    global _folder
    _folder = None
    _running.close()


@contextlib.contextmanager
def _cluster() -> Iterator[Path]:
    import ray
    from ray._private.parameter import RayParams

    before = set(processes_under(os.getpid()))
    folder = tempfile.TemporaryDirectory(
        prefix="ray-",
        dir="/tmp",  # for its sockets, whose paths must be short
        ignore_cleanup_errors=True,  # processes that are still ending may write
    )
    with folder as path, pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)  # until the end: Ray Data reads them when it is used
        make = functools.partialmethod(
            RayParams.__init__, no_monitor=True, include_log_monitor=False
        )
        patch.setattr(RayParams, "__init__", make)
        ray.init(
            "local", num_cpus=NUM_CPUS, object_store_memory=1 << 27, include_dashboard=False,
            log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1",
            _temp_dir=path,
        )  # fmt: skip
        try:
            yield Path(path)
        finally:
            ours = set(processes_under(os.getpid())) - before
            ray.shutdown()
    wait_until("processes of the cluster are left", lambda: all(map(has_ended, ours)))
    wait_until("threads of Ray are left", lambda: not any(map(is_of_ray, threading.enumerate())))


def processes_under(pid: int) -> dict[int, str]:
    """The processes that a process has started, and those that they have, with their commands."""
    children = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(process.name))
    found: dict[int, str] = {}
    new = [pid]
    while new:
        for child in children[new.pop()]:
            new.append(child)
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                found[child] = command.replace(b"\0", b" ").decode()
    return found


def is_of_ray(thread: threading.Thread) -> bool:
    """Whether a thread's function or class is Ray's, as far as Python tells."""
    sources = (type(thread), getattr(thread, "_target", None))
    return any(getattr(one, "__module__", "").partition(".")[0] == "ray" for one in sources)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, whoever its parent is."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
