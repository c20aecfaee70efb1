"""Conversations compute hardly more tokens than they must, in a small run of the benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

ROOT = Path(__file__).parents[2]
SMALL = ("--num-conversations", "20", "--num-turns", "5", "--num-checkpoints", "100")


@pytest.mark.parametrize("kind", ["hybrid", "alone", "kv"])
def test_conversations_compute_each_token_about_once(kind: str) -> None:
    """A turn begins at the last full block of the one before, the first one after its system's.

    With checkpoints only at intervals and at the ends of prompts, it would be 2.2 times as many.
    """
    done = subprocess.run(
        [sys.executable, "benchmarks/conversations.py", "--kinds", kind, *SMALL],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert 0 < result["least"] <= result["computed"] and result["ratio"] < 1.02
