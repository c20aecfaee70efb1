"""What tests cost: processor seconds by file, shown after each run and compared with a recording.

Processor time of a worker and of the processes that it waits for, unlike time on a clock, is nearly
the same on a busy machine. `--record-costs` writes the recording, which is kept in the repository.
"""

import json
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORDING = Path(__file__).parent / "data" / "costs.json"
SHOWN = 10  # files
GROWN = 10.0  # seconds that a file may cost more than in the recording before it is shown
LEAST = 1.0  # seconds of a file in the recording
COMPARED = 20  # the costliest files, whose median tells how fast this machine is


def seconds() -> float:
    """Processor time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Costs:
    """Adds each phase's cost to its report, and sums the reports up by file."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self._last = seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        now = seconds()
        report.cost, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.files[report.nodeid.partition("::")[0]] += getattr(report, "cost", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.files:
            return
        total = sum(self.files.values())
        terminalreporter.section(f"costliest files, of {total:.0f} processor seconds")
        for file, cost in self.files.most_common(SHOWN):
            terminalreporter.write_line(f"{cost:7.1f} s  {file}")
        if config.getoption("record_costs"):
            write(self.files)
        else:
            for line in growth(self.files, recorded()):
                terminalreporter.write_line(line)


def recorded() -> dict[str, float]:
    """The recorded costs by file, of files that cost at least `LEAST`."""
    found: dict[str, float] = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    return found


def growth(files: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """A line for each file that costs over `GROWN` more than it did, on a machine of this speed."""
    both = sorted(recorded.keys() & files.keys(), key=recorded.__getitem__)[-COMPARED:]
    if not both:
        return []
    speed = statistics.median(files[file] / recorded[file] for file in both)
    grown = {file: cost - speed * recorded.get(file, 0.0) for file, cost in files.items()}
    return [
        f"grew by {more:.0f} s: {file} ({files[file]:.0f} s)"
        for file, more in sorted(grown.items(), key=lambda item: -item[1])
        if more > GROWN
    ]


def write(files: dict[str, float]) -> None:
    kept = {file: round(cost, 1) for file, cost in sorted(files.items()) if cost >= LEAST}
    RECORDING.write_text(json.dumps(kept, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-costs",
        action="store_true",
        help=f"write the costs of this run to {RECORDING.name}",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs of files")
