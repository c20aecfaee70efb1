"""README and docs/: links lead somewhere, figures and tables are made of docs/results/."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BENCHMARKS = DOCS / "benchmarks.md"
RESULTS = sorted((DOCS / "results").glob("*.jsonl"))
MAX_WORDS = {ROOT / "README.md": 1500, BENCHMARKS: 1500}
FIELDS = {
    "what": "decode", "engine": "nanovllm", "value": 2.0, "unit": "s", "roofline_percent": None,
    "machine": "a CPU", "date": "2026-11-21", "command": "nanovllm bench", "note": "",
}  # fmt: skip


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    return tool("plot_results")


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return tool("write_architecture")


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    return tool("write_readme")


def tool(name: str) -> ModuleType:
    """A script of tools/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def without_code(page: str) -> str:
    """A page without fenced blocks, indented blocks and inline code."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^    .*$", "", page, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", page)


def links(page: str) -> list[str]:
    """The targets of all links and images that are not on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    return [target for target in targets if not target.startswith(("https://", "http://"))]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        found = target.exists()
        if found and anchor:
            found = anchor in anchors(target.read_text(encoding="utf-8"))
        if not found:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_links_to_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    good = "[a](page.md) [b](#one-two-3) [c](https://example.com) `[d](none.md)` ![e](page.md)"
    page.write_text(f"# One, `two` 3\n\n{good}\n", encoding="utf-8")
    assert broken_links(page) == []
    page.write_text("# One\n\n[a](none.md) [b](page.md#two) ![c](x.svg)\n", encoding="utf-8")
    assert broken_links(page) == ["none.md", "page.md#two", "x.svg"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, todo = set(), [PAGES[0]]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = (page.parent / link.partition("#")[0] for link in links(page.read_text("utf-8")))
        todo += [target.resolve() for target in targets if target.suffix == ".md"]
    assert set(PAGES) - reached == set()


@pytest.mark.parametrize("page", MAX_WORDS, ids=page_name)
def test_pages_that_all_read_first_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MAX_WORDS[page]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=page_name)
def test_pages_have_no_marks_of_merges(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("<<<<<<< ", ">>>>>>> "))]


@pytest.mark.parametrize("file", RESULTS, ids=page_name)
def test_every_line_of_results_is_a_figure_with_all_fields(file: Path, plot: ModuleType) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines
    for line in lines:
        fields = json.loads(line)
        assert list(fields) == list(FIELDS), line
        plot.Result(**fields)


def test_there_are_results() -> None:
    assert RESULTS


def test_no_two_figures_are_of_one_thing(plot: ModuleType) -> None:
    plot.Results.read(DOCS / "results")
    twice = plot.Result(**FIELDS)
    with pytest.raises(ValueError, match="two figures for"):
        plot.Results([twice, twice])


@pytest.mark.parametrize(
    ("name", "value"),
    [("unit", "parsecs"), ("value", 0), ("date", "yesterday"), ("command", ""), ("machine", None)],
)
def test_a_bad_field_is_refused(name: str, value: Any, plot: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"must be|missing|isoformat"):
        plot.Result(**{**FIELDS, name: value})


def test_less_time_is_more_speed(plot: ModuleType) -> None:
    ours, theirs = plot.Result(**FIELDS), plot.Result(**{**FIELDS, "value": 3.0})
    assert ours.speed_against(theirs) == 1.5
    tokens = dataclasses.replace(ours, unit="output tok/s")
    assert tokens.speed_against(dataclasses.replace(theirs, unit="output tok/s")) == 2 / 3
    with pytest.raises(ValueError, match="units differ"):
        tokens.speed_against(theirs)


def test_figures_and_tables_are_what_the_script_makes(plot: ModuleType) -> None:
    """After a change: python tools/plot_results.py."""
    files = plot.make_files()
    assert {path.name for path in files} == {"benchmarks.md", "speed.svg", "roofline.svg"}
    stale = [page_name(path) for path, text in files.items() if path.read_text("utf-8") != text]
    assert stale == []


def test_no_figure_is_left_that_the_script_does_not_draw(plot: ModuleType) -> None:
    assert {file.stem for file in (DOCS / "figures").iterdir()} == set(plot.FIGURES)


def test_all_tables_of_measured_figures_are_between_markers(plot: ModuleType) -> None:
    """A figure that somebody types into the page by hand goes stale."""
    page = BENCHMARKS.read_text(encoding="utf-8")
    tables = re.findall(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->\n", page, re.DOTALL)
    assert tables == list(plot.TABLES)
    rest = re.sub(r"<!-- table: .*?<!-- end of table -->\n", "", page, flags=re.DOTALL)
    headers = re.findall(r"^(\|.*)\n\|---", rest, flags=re.MULTILINE)
    assert headers == ["| | machine | software |"]


def test_a_page_without_a_tables_marker_is_refused(plot: ModuleType) -> None:
    results = plot.Results.read(DOCS / "results")
    page = BENCHMARKS.read_text(encoding="utf-8").replace("<!-- table: cpu -->", "")
    with pytest.raises(ValueError, match="one table 'cpu', not 0"):
        plot.fill_tables(page, results)


def test_the_cores_table_has_the_lines_of_its_files(architecture: ModuleType) -> None:
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert page == architecture.page(), "run tools/write_architecture.py"


def test_the_readme_has_the_sizes_of_the_code(readme: ModuleType) -> None:
    assert readme.PAGE.read_text(encoding="utf-8") == readme.page(), "run tools/write_readme.py"


def test_sizes_are_rounded_to_the_nearest_multiple(readme: ModuleType) -> None:
    assert [readme.about(n, 100) for n in (6949, 6951)] == ["about 6,900", "about 7,000"]


def test_methods_and_coroutines_count_as_tests_and_helpers_do_not(readme: ModuleType) -> None:
    source = "def test_a(): ...\nasync def test_b(): ...\nclass C:\n    def test_c(self): ...\n"
    assert readme.test_functions(source + "def helper(): ...\n") == 3


def test_the_core_has_at_most_7400_lines(architecture: ModuleType) -> None:
    assert sum(sum(lines.values()) for lines in architecture.core().values()) <= 7400


def test_lines_of_code_leave_out_comments_docstrings_and_blanks(architecture: ModuleType) -> None:
    source = (
        '"""What it is."""\n\nx = (\n    1,  # one\n)\n# nothing\nasync def f():\n    """Doc."""\n'
    )
    assert architecture.code_lines(source) == 4


def test_the_dockerfile_copies_what_the_package_is_built_of() -> None:
    """No Docker runs in the tests; pip reads these files, and pyproject.toml names others."""
    text = (DOCS / "serving.md").read_text()
    (dockerfile,) = re.findall(r"```dockerfile\n(.*?)```", text, re.DOTALL)
    lines = [line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY")]
    copied = {name for line in lines for name in line}
    assert all((ROOT / name).exists() for name in copied), copied
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^(?:readme|license-files|packages) = .*?"(.+)"', project, re.MULTILINE)
    assert len(named) == 3 and copied >= {*named, "pyproject.toml", "constraints.txt"}
    assert "\nserve = [" in project and "[serve]'" in dockerfile
