"""Hints for errors: names that clients choose make no work without a bound."""

import difflib
from typing import Any

import pytest

from nanovllm.utils import hints
from nanovllm.utils.checks import did_you_mean


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pairs of characters that each search for near names may compare."""
    found: list[int] = []
    plain = difflib.get_close_matches

    def counted(name: str, known: Any, **options: Any) -> list[str]:
        found.append(len(name) * sum(map(len, known)))
        return plain(name, known, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    return found


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a" * 1_000_000, ["temperature"]),
        ("tool_x", [f"tool_{number}" for number in range(16_000)]),
        ("a" * 100, ["a" * 99 + chr(number) for number in range(0x100, 0x180)]),
    ],
    ids=["a long name", "many names", "many long names"],
)
def test_long_names_and_lists_get_no_hint(name: str, known: list[str], compared: list[int]) -> None:
    assert did_you_mean(name, known) == "" and not compared


def test_the_names_of_a_request_get_hints(compared: list[int]) -> None:
    known = [f"option_number_{number}" for number in range(300)] + ["temperature"]
    assert did_you_mean("temprature", known) == "; did you mean 'temperature'?"
    assert max(compared) < hints.MOST_PAIRS
