"""The cores that a container's quota leaves."""

import sys
from pathlib import Path

import pytest

from nanovllm.utils.resources import allowed_cores

V1 = "4:memory:/\n3:cpu,cpuacct:{group}\n"
V2 = "0::{group}\n"


def system(root: Path, cgroups: str, files: dict[str, str]) -> Path:
    """A folder with a process's control groups and these files of theirs."""
    for name, text in {"proc/self/cgroup": cgroups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def v1(quota: int, period: int = 100_000, group: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu{group}"
    return {
        f"{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"{folder}/cpu.cfs_period_us": f"{period}\n",
    }


@pytest.mark.parametrize(
    ("cgroups", "files", "expected"),
    [
        (V2.format(group="/"), {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (V2.format(group="/"), {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        (V2.format(group="/"), {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (V2.format(group="/"), {"sys/fs/cgroup/cpu.max": "max 100000\n"}, sys.maxsize),
        (V2.format(group="/a/b"), {"sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        (
            V2.format(group="/a/b"),
            {
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
            },
            3,
        ),
        (V2.format(group="/of/the/host"), {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (V1.format(group="/"), v1(150_000, 50_000), 3),
        (V1.format(group="/"), v1(-1), sys.maxsize),
        (V1.format(group="/docker/x"), v1(200_000), 2),
        (V1.format(group="/a"), v1(200_000, group="/a"), 2),
        (V1.format(group="/"), {}, sys.maxsize),
        ("", {}, sys.maxsize),
    ],
)  # fmt: skip
def test_the_smallest_quota_counts_in_whole_cores(
    cgroups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert allowed_cores(system(tmp_path, cgroups, files)) == expected


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert allowed_cores(tmp_path) == sys.maxsize
    assert allowed_cores() >= 1
