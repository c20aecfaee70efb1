"""Write the sizes of the code into README.md, rounded so that a small change does not alter them.

    python tools/write_readme.py

A test fails if README.md differs from what this writes. The core is the files that
tools/write_architecture.py lists. Lines are those with code: no blank lines, comments or
docstrings.
"""

import ast
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tools/ is not a package

from write_architecture import ROOT, code_lines, core

PAGE = ROOT / "README.md"
START, END = "<!-- sizes -->\n", "<!-- end -->"
WIDTH = 120


def sizes() -> str:
    """A paragraph with the sizes of the core, of the package and of the tests."""
    core_lines = [lines for part in core().values() for lines in part.values()]
    package = [code_lines(file.read_text("utf-8")) for file in (ROOT / "nanovllm").rglob("*.py")]
    tests = sum(
        test_functions(file.read_text("utf-8")) for file in (ROOT / "tests").rglob("test_*.py")
    )
    return textwrap.fill(
        "The [core](docs/architecture.md), which is the path of a request through the engine with"
        f" plain kernels, has {about(sum(core_lines), 100)} lines of Python on PyTorch in"
        f" {about(len(core_lines), 10)} files. The whole package, with fast kernels, speculation,"
        " quantization, adapters, structured output and a server, has"
        f" {about(sum(package), 100)} lines in {about(len(package), 10)} files (docstrings and"
        f" comments not counted), and {about(tests, 100)} test functions check it.",
        WIDTH,
        break_on_hyphens=False,
    )


def about(number: int, unit: int) -> str:
    """`number`, rounded to a multiple of `unit`."""
    return f"about {round(number / unit) * unit:,}"


def test_functions(source: str) -> int:
    """The number of test functions in a test file; a parametrized one counts once."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return sum(node.name.startswith("test_") for node in nodes)


def page() -> str:
    """The text of README.md with the sizes as they should be."""
    before, rest = PAGE.read_text("utf-8").split(START)
    return before + START + sizes() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
