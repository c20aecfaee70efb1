"""The benchmark beside llama.cpp: its figures, its prompts, and llama.cpp where there is one."""

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The script, and the part of it that llama.cpp's Python runs."""
    monkeypatch.syspath_prepend(str(FOLDER))  # as when the script is run
    return importlib.import_module("llama"), importlib.import_module("llama_peer")


def test_a_ratio_is_the_median_of_the_rounds_ratios(modules: tuple[Any, Any]) -> None:
    script, _ = modules
    figures = {
        "1 request": {
            "bfloat16": [10.0, 20.0, 60.0], "BF16": [10.0, 40.0, 30.0],
            "int8": [8.0, 8.0, 8.0], "Q8_0": [4.0, 4.0, 4.0],
            "int4": [9.0, 9.0, 9.0], "Q4_0": [3.0, 3.0, 3.0], "Q4_K_M": [18.0, 18.0, 18.0],
        }
    }  # fmt: skip
    rows = script.report(figures)
    assert [(row["ours"], row["theirs"], row["ratio"]) for row in rows] == [
        ("bfloat16", "BF16", 1.0), ("int8", "Q8_0", 2.0), ("int4", "Q4_0", 3.0),
        ("int4", "Q4_K_M", 0.5),
    ]  # fmt: skip
    assert rows[0]["tok_s"] == 20.0 and rows[0]["ratios"] == [1.0, 0.5, 2.0]


def test_no_two_prompts_begin_alike(modules: tuple[Any, Any]) -> None:
    _, peer = modules
    made = [p for index in range(40) for p in peer.prompts(16, 16, index)]
    made += [p for index in range(40, 60) for p in peer.prompts(1, 512, index)]
    assert len({prompt[0] for prompt in made}) == len(made)
    assert all(0 <= token < peer.VOCAB for prompt in made for token in prompt)


def test_llama_cpp_measures_a_small_model(
    modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    pytest.importorskip("gguf")
    _, peer = modules
    files = importlib.import_module("llama_files")
    small = dict(vocab=1000, hidden=256, inner=512, heads=4, kv_heads=2)
    for name, layers in (("qwen3", 2), ("qwen35", 4)):
        write = functools.partial(getattr(files, f"write_{name}"), layers=layers, **small)
        monkeypatch.setitem(files.SHAPES, name, write)
    monkeypatch.setattr(peer, "VOCAB", 1000)
    for name in ("qwen3:BF16", "qwen3:Q8_0", "qwen3:Q4_0", "qwen3:Q4_K_M", "qwen35:Q4_K_M"):
        measure = peer.llama(name, tmp_path, 1, 16, 512)
        for index, counts in enumerate([(1, 16, 20), (16, 16, 3), (1, 500, 0)]):
            assert measure(*counts, index) > 0
    assert len(list(tmp_path.glob("*.gguf"))) == 6
