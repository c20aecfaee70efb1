"""Resources of this process: its allowed cores, its heap, and sizes of memory as texts."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"


def allowed_cores(root: Path = ROOT) -> int:
    """The whole cores that fit all quotas of this process, at least 1; sys.maxsize without any.

    With more threads, the quota would be used up early, and all threads would wait. `root` is the
    folder with /proc and /sys.
    """
    return max(1, int(min(_quotas(root), default=sys.maxsize)))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of each control group of the process and of the groups above it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                yield from _of_files(root / CGROUPS, group, "cpu.max")
            elif "cpu" in controllers.split(","):
                yield from _of_files(
                    root / CGROUPS / "cpu", group, "cpu.cfs_quota_us", "cpu.cfs_period_us"
                )


def _of_files(folder: Path, group: str, *names: str) -> Iterator[float]:
    """The quotas in the files of a group and of the groups above it that a container sees."""
    path = folder / group.lstrip("/")
    for level in (path, *path.parents):
        with contextlib.suppress(OSError, ValueError):  # "max": no quota
            texts = [(level / name).read_text(encoding="utf-8") for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0 and period > 0:
                yield quota / period
        if level == folder:
            return


def trim_heap() -> None:
    """Return free memory to the system, where the C library is glibc.

    glibc keeps much freed memory, in a heap for each thread, and loading a model frees a lot.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_what_lives() -> None:
    """Exclude existing objects from garbage collection, which stops all threads for 0.1 s.

    Only for nanovllm's own processes: a caller's objects may still become garbage.
    """
    gc.collect()
    gc.freeze()


def memory_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    if num_bytes < GIB / 10:
        return f"{num_bytes / MIB:,.1f} MiB"
    return f"{num_bytes / GIB:,.3f} GiB"
