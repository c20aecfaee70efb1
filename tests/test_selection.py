"""Which tests a run has, which worker runs them, and what is said of their costs."""

import ast
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import costs
import pytest
import selection
import sharing


@pytest.fixture(params=["one commit", "another"])
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(selection, "SEED", request.param)
    monkeypatch.setattr(selection, "everything", False)
    return str(request.param)


@pytest.mark.parametrize("pairs", [False, True])
def test_every_value_or_pair_is_covered_by_few_combinations(pairs: bool) -> None:
    combinations = [
        dict(zip("abcd", values, strict=True))
        for values in itertools.product(range(4), range(3), range(3), range(2))
        if values[:2] != (3, 2)  # one that was left out
    ]
    kept = [combinations[i] for i in selection.covering(combinations, pairs, random.Random(1))]
    for names in itertools.combinations("abcd", 2 if pairs else 1):
        for some in (combinations, kept):
            found = {tuple(c[name] for name in names) for c in some}
            assert found == {tuple(c[name] for name in names) for c in combinations}
    assert len(kept) <= (20 if pairs else 6) < len(combinations)


def test_a_sample_follows_from_the_seed_and_keeps_the_order(seed: str) -> None:
    kept = selection.sample(range(100), 0.1, "group")
    assert kept == sorted(kept) == selection.sample(range(100), 0.1, "group")
    assert len(kept) == 10 != kept != selection.sample(range(100), 0.1, "another group")
    assert len(selection.sample("abc", 0.01, "group")) == 1


def test_another_commit_has_another_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "everything", False)
    samples = set()
    for number in range(20):
        monkeypatch.setattr(selection, "SEED", str(number))
        samples |= set(selection.sample(range(10), 0.2, "group"))
    assert samples == set(range(10)), "all are run in the end"


def test_one_of_each_kind_is_kept_unless_all_are_wanted(
    seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["ant", "bee", "auk", "bat", "asp"]
    kept = selection.one_of_each(words, lambda word: word[0], "group")
    assert [word[0] for word in kept] == ["a", "b"]
    monkeypatch.setattr(selection, "everything", True)
    assert sorted(selection.one_of_each(words, lambda word: word[0], "group")) == sorted(words)


def test_tests_of_a_file_have_the_same_name_of_each_kind(seed: str) -> None:
    def of(name: str, regime: int) -> pytest.Item:
        return SimpleNamespace(callspec=SimpleNamespace(params=dict(name=name, regime=regime)))  # type: ignore[return-value]

    names = [f"{family}, {n}" for family in "abcdefgh" for n in range(3)]

    def chosen(some: list[str]) -> set[str]:
        items = [of(name, regime) for name in some for regime in range(2)]
        kept = selection.of_each_kind(items, lambda name: name[0], "a.py")
        found = [item.callspec.params["name"] for item in kept]  # type: ignore[attr-defined]
        assert sorted(found) == sorted([*set(found)] * 2), "all regimes of a name"
        return set(found)

    assert [name[0] for name in sorted(chosen(names))] == list("abcdefgh")
    assert chosen(names[6:]) == {name for name in chosen(names) if name[0] > "b"}


def test_files_that_grew_are_named_whatever_the_machines_speed() -> None:
    recorded = {f"{n}.py": float(n) for n in range(5, 40)}
    twice_as_slow = {file: 2 * cost for file, cost in recorded.items()}
    assert costs.growth(twice_as_slow, recorded) == []
    changed = twice_as_slow | {"20.py": 55.0, "new.py": 12.0, "cheap.py": 9.0}
    lines = costs.growth(changed, recorded)
    assert lines == ["grew by 15 s: 20.py (55 s)", "grew by 12 s: new.py (12 s)"]
    assert costs.growth({"new.py": 99.0}, {}) == []


def test_costly_files_come_first_and_stay_together() -> None:
    names = ["a.py::a", "a.py::b[1-2]", "b.py::a", "c.py::a", "c.py::b", "d.py::a", "e.py::a"]
    keywords = {"c.py::b": ["slow"], "d.py::a": ["slow"]}
    items = [SimpleNamespace(nodeid=name, keywords=keywords.get(name, [])) for name in names]
    sharing.sort(items, {"b.py": 9.0, "d.py": 2.0, "e.py": 7.0})  # type: ignore[arg-type]
    files = ["c.py", "c.py", "b.py", "e.py", "d.py", "a.py", "a.py"]
    assert [item.nodeid.partition("::")[0] for item in items] == files
    assert [item.nodeid for item in items if item.nodeid[0] in "ac"] == [
        "c.py::a", "c.py::b", "a.py::a", "a.py::b[1-2]",
    ]  # fmt: skip


def test_one_worker_makes_what_tests_share() -> None:
    unit_of, families = sharing.unit_of, sharing.FAMILIES
    assert unit_of("tests/test_a.py::test_b[c-1]") == unit_of("tests/test_a.py::test_d")
    assert unit_of("tests/test_ray.py::test_a") == unit_of("tests/test_ray_serve.py::test_b")
    of_family = [unit_of(f"{families}::test_{i}[Phi, a{end}]") for i, end in enumerate(["-b", ""])]
    assert of_family[0] == of_family[1] != unit_of(f"{families}::test_0[Phi-b]")
    assert all((Path(__file__).parents[1] / file).exists() for file in (families, *sharing.COMMON))


def test_files_that_cost_much_say_why() -> None:
    """And the recording is of files that there are."""
    root = Path(__file__).parents[1]
    for file, cost in json.loads(costs.RECORDING.read_text()).items():
        reason = ast.get_docstring(ast.parse((root / file).read_text())) or ""
        assert cost <= 20 or "seconds: " in reason, file
