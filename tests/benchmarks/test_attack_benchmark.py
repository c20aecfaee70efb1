"""The benchmarks that attack a server run, and report what ordinary clients saw."""

import json
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def lines_of(script: str, *arguments: str) -> list[dict[str, object]]:
    """The lines that a script prints."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_an_attack_is_measured_next_to_a_time_without_one() -> None:
    calm, attacked = lines_of(
        "attack.py", "--seconds", "0.5", "--streams", "2", "--rest", "0.1", "--only", "brackets"
    )
    assert calm["attack"] == "nothing" and attacked["attack"] == "100,000 brackets"
    assert calm["sent"] == 0 and attacked["sent"]
    assert calm["failed"] == attacked["failed"] == 0
    assert all(line["longest_gap_ms"] and line["tokens_per_second"] for line in (calm, attacked))


def test_a_soak_reports_statuses_and_what_the_server_uses() -> None:
    (line,) = lines_of("soak.py", "--seconds", "1", "--clients", "2", "--rest", "0.1")
    assert line["statuses"]["200"]  # type: ignore[index]
    assert line["wrong"] == 0 and line["memory_mib"] and line["files"] and line["threads"]
