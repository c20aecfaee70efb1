"""How many cores this process may use: containers often limit their time, not their list."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"


def allowed_cores(root: Path = ROOT) -> int:
    """The whole cores that fit all quotas of this process, at least 1; sys.maxsize without any.

    More threads than that would wait for each other while the quota is used up. `root` is the
    folder of /proc and /sys.
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
