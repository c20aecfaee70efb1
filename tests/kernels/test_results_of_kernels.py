"""What functions of Triton may return: with Triton 3.6, a result that is None does not compile."""

import ast
from pathlib import Path

import nanovllm.kernels

FOLDER = Path(nanovllm.kernels.__file__).parent / "triton"


def parts(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.Tuple) else [value]


def returned_none(source: str) -> list[str]:
    """The parts of results of compiled functions that may be None, with their functions."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any("jit" in ast.unparse(each) for each in function.decorator_list):
            continue
        nones, returned = {"None"}, set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and "None" in map(ast.unparse, parts(node.value)):
                nones |= {ast.unparse(part) for each in node.targets for part in parts(each)}
            if isinstance(node, ast.Return) and node.value is not None:
                returned |= set(map(ast.unparse, parts(node.value)))
        found += [f"{function.name}: {name}" for name in sorted(nones & returned)]
    return found


def test_no_compiled_function_returns_none() -> None:
    wrong = {path.name: returned_none(path.read_text()) for path in FOLDER.rglob("*.py")}
    assert len(wrong) > 50
    assert not {name: names for name, names in wrong.items() if names}


def test_none_is_found_in_a_result() -> None:
    source = "@triton.jit\ndef f(x, HAS):\n    y, z = None, None\n    return x, y"
    assert returned_none(source) == ["f: y"]
    assert returned_none("@jit\ndef f(x):\n    return x, None") == ["f: None"]
    assert not returned_none("@triton.jit\ndef f(x):\n    y = None\n    return x[None, :]")
