"""A Ray cluster on this machine, and its processes."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def local_cluster(num_cpus: int) -> Iterator[Path]:
    """A cluster for the time of the block; gives its folder.

    Ray does not check whether the machine has as many cores.
    """
    import ray

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(
            prefix="ray-",
            dir="/tmp",  # for its sockets, whose paths must be short
            ignore_cleanup_errors=True,  # processes that are still ending may write
        ) as path,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: other tests would take the cores
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "600")  # a slow machine may need it
        ray.init(
            "local", num_cpus=num_cpus, object_store_memory=1 << 27, include_dashboard=False,
            log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1",
            _temp_dir=path,
        )  # fmt: skip
        try:
            yield Path(path)
        finally:
            ray.shutdown()


def processes_under(pid: int) -> dict[int, str]:
    """The processes that a process has started, and those that they have, with their commands."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    found[child] = command.replace(b"\0", b" ").decode()
                found |= processes_under(child)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, whoever its parent is."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
