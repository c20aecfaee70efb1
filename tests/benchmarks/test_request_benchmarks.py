"""The benchmarks that compare whole requests run on a small machine, and report what they say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT

ROOT = Path(__file__).parents[2]
SMALL = ("--shape", "qwen3-42m", "--rounds", "1")


def run(script: str, *argv: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *SMALL, *argv],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_requests_with_adapters_are_compared_with_those_without() -> None:
    lengths = ("--input-len", "4", "--output-len", "2")
    several, one = run("adapter_requests.py", "--loads", "3x2,1x1", *lengths)
    assert (several["requests"], several["adapters"]) == (3, 2)
    assert (one["requests"], one["adapters"]) == (1, 1)
    for line in (several, one):
        assert line["extremes"] == [line["share"]] * 2, "of one round"
        assert line["share"] == pytest.approx(line["with"] / line["without"], rel=0.1)


@pytest.mark.slow
def test_vectors_are_compared_with_prefill() -> None:
    (line,) = run("embed.py", "--loads", "4x8")
    assert (line["prompts"], line["tokens"]) == (4, 8)
    assert line["ratio"] == pytest.approx(line["embed"] / line["prefill"], rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.Runner")
def test_first_tokens_of_three_engines_are_compared() -> None:
    (line,) = run("first_token.py", "--pauses", "0", "--prompt-len", "8")
    assert line["pause_ms"] == 0
    for name in ("async", "server"):
        assert line[f"{name}_later"] == pytest.approx(line[name] - line["stream"], abs=0.05)
