"""tools/mutants.txt is up to date: each mistake has its place in the code, and tests that exist."""

import re
from pathlib import Path

import pytest
from test_docs import tool

mutants = tool("mutants")
ROOT = Path(__file__).parents[1]
Mutant, read_list = mutants.Mutant, mutants.read_list
ONE = "[a: b]\nf.py\ntests/test_docs.py\n x = 1\n-y = 2\n+y = 3\n"


def test_every_mistake_has_one_place_and_tests() -> None:
    """After a change of the code: the lines in tools/mutants.txt follow it."""
    texts: dict[str, str] = {}
    listed = read_list(mutants.LIST.read_text(encoding="utf-8"))
    assert len(listed) >= 150
    for mutant in listed:
        if mutant.file not in texts:
            texts[mutant.file] = (ROOT / mutant.file).read_text(encoding="utf-8")
        mutant.plant(texts[mutant.file])
        for file in mutant.test_files:
            assert (ROOT / file).exists(), f"mutant {mutant.name!r}: there is no {file}"


def test_a_mistake_is_planted_as_a_patch() -> None:
    (mutant,) = read_list(f"# a comment\n\n{ONE}survives: so it is\n")
    assert mutant == Mutant(
        "a: b", "f.py", ("tests/test_docs.py",), "x = 1\ny = 2\n", "x = 1\ny = 3\n", "so it is"
    )
    assert mutant.plant("x = 1\ny = 2\ny = 2\n") == "x = 1\ny = 3\ny = 2\n"
    named = read_list(ONE.replace("docs.py", "docs.py::test_one tests/test_llm.py"))[0]
    assert named.test_files == ["tests/test_docs.py", "tests/test_llm.py"]
    assert named.first_tests == {"test_one"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y = 2\n", "'a: b': its old lines occur 0 times in f.py"),
        ("x = 1\ny = 2\nx = 1\ny = 2\n", "'a: b': its old lines occur 2 times in f.py"),
        ("if x:\n    x = 1\n    y = 2\n", "occur 0 times"),
        ("(\nx = 1\ny = 2\n", "'a: b' is no Python"),
    ],
)
def test_a_mistake_without_a_place_is_an_error(text: str, message: str) -> None:
    (mutant,) = read_list(ONE)
    with pytest.raises(ValueError, match=re.escape(message)):
        mutant.plant(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE + "\n" + ONE, "two mutants have the name 'a: b'"),
        (ONE.replace("+y = 3", "+y = 2"), "'a: b' changes nothing"),
        (ONE.replace("[a: b]", "a: b"), "must have a [name]"),
        (ONE.replace("+y", "y"), "must have a [name]"),
        ("[a: b]\nf.py\ntests/test_docs.py\n", "must have a [name]"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_list(text)
