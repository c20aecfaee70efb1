"""Which tests a run has: all of them with `--all`, else a sample of those marked `sampled`.

Some tests have more combinations than a change needs: `sampled` keeps some of them, so that every
value of every parameter occurs (with `pairs=True`: every pair of values of two parameters), or a
`share` of them. With `kind`, a function, it keeps one `name` of each kind, or a `share` of these;
all tests of a file have the same names. Which ones, and which examples hypothesis tries, follows
from a seed: the commit, or $NANOVLLM_TESTS_SEED, so that the same commit has the same tests and the
next one others.
"""

import itertools
import math
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
import torch

T = TypeVar("T")


def commit() -> str:
    """The checked-out commit's number, or a fixed word where there is no git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "none"
    return done.stdout.strip() or "none"


SEED = os.environ.setdefault("NANOVLLM_TESTS_SEED", "") or commit()
os.environ["NANOVLLM_TESTS_SEED"] = SEED  # inherited by pytest-xdist's workers
NUMBER = random.Random(SEED).getrandbits(30)  # where seeds of random walks begin
everything = False  # set before test modules are imported


def sample(values: Iterable[T], share: float, group: str) -> list[T]:
    """A share of the values, in their order, at least one; all of them with `--all`."""
    found = list(values)
    if everything:
        return found
    number = max(1, math.ceil(share * len(found)))
    kept = random.Random(f"{SEED} {group}").sample(range(len(found)), number)
    return [found[index] for index in sorted(kept)]


def one_of_each(values: Iterable[T], kind: Callable[[T], Any], group: str) -> list[T]:
    """One value of each kind, in their order; all of them with `--all`."""
    kinds: dict[Any, list[T]] = {}
    for value in values:
        kinds.setdefault(kind(value), []).append(value)
    return [
        value
        for key, same in kinds.items()
        for value in (same if everything else [random.Random(f"{SEED} {group} {key}").choice(same)])
    ]


def of_each_kind(
    items: list[pytest.Item], kind: Callable[[str], str], file: str
) -> list[pytest.Item]:
    """The tests with one `name` of each kind."""
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    chosen = one_of_each(dict.fromkeys(names), kind, file)
    return [item for item, name in zip(items, names, strict=True) if name in chosen]


def examples(number: int) -> int:
    """How many examples hypothesis tries: a quarter without `--all`; each commit tries others."""
    return number if everything else max(5, -(-number // 4))


def covering(combinations: Sequence[dict[str, int]], pairs: bool, rng: random.Random) -> list[int]:
    """Indices of few combinations with every value, or pair of values, that occurs in any."""

    def parts(combination: dict[str, int]) -> set[Any]:
        values = sorted(combination.items())
        return set(itertools.combinations(values, 2) if pairs and len(values) > 1 else values)

    order = list(range(len(combinations)))
    rng.shuffle(order)
    missing = {index: parts(combinations[index]) for index in order}
    kept = []
    while missing:
        best = max(missing, key=lambda index: len(missing[index]))
        covered = missing.pop(best)
        kept.append(best)
        missing = {index: left for index, some in missing.items() if (left := some - covered)}
    return sorted(kept)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all combinations, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    global everything
    everything = bool(config.getoption("--all"))
    hypothesis.core.global_force_seed = NUMBER  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> str:
    which = "all tests" if everything else "a sample of the tests (--all runs all)"
    return f"{which}, NANOVLLM_TESTS_SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of tests marked `sampled`, unless they were asked for by name."""
    if everything or any("[" in argument for argument in config.args):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_skipped = "cuda" in item.keywords and not torch.cuda.is_available()
        if "sampled" in item.keywords and hasattr(item, "callspec") and not is_skipped:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        candidates = group
        if kind := marker.kwargs.get("kind"):
            candidates = of_each_kind(group, kind, name.partition("::")[0])
            kept = set(candidates)
        if share := marker.kwargs.get("share"):
            kept = set(sample(candidates, share, name))
        elif not kind:
            combinations = [
                {name: id(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
                for item in group
            ]
            rng = random.Random(f"{SEED} {name}")
            chosen = covering(combinations, marker.kwargs.get("pairs", False), rng)
            kept = {group[index] for index in chosen}
        left_out |= set(group) - kept
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
