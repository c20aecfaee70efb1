"""The loading benchmark runs, loads the files that it has written, and removes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loading.py"


def run_cli(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cold",)])
def test_a_small_run_measures_and_removes_its_files(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run_cli(tmp_path, "--gb", "0.1", "--files", "3", "--repeats", "1", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0.1e9 < figures["bytes"] < 0.12e9 and figures["cold"] == bool(options)
    assert set(figures["seconds"]) == {
        "load_model", "a tensor at a time", "cat", "fill from memory",
    }  # fmt: skip
    assert min(figures["seconds"].values()) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("option", [("--gb", "0"), ("--files", "0"), ("--repeats", "0")])
def test_an_impossible_size_is_a_usage_error(tmp_path: Path, option: tuple[str, str]) -> None:
    done = run_cli(tmp_path, *option)
    assert done.returncode == 2 and option[0] in done.stderr and not done.stdout
