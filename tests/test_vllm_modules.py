"""vLLM's import paths with our package's name: errors that say what to import instead."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import nanovllm
from nanovllm.from_vllm.names import calls, modules, python, server
from nanovllm.from_vllm.names.modules import MODULES
from nanovllm.from_vllm.names.options import ENGINE, POOLING, SAMPLING

ROOT = Path(nanovllm.__file__).parents[1]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("lora.request", "from nanovllm import LoRARequest"),
        ("engine.arg_utils", "from nanovllm import EngineArgs, AsyncEngineArgs"),
        ("entrypoints.llm", "from nanovllm import LLM"),
        ("v1.engine.async_llm", "from nanovllm import LLMEngine, AsyncLLM"),
        ("inputs.data", "from nanovllm import TextPrompt"),
        ("multimodal.utils", "models are text only"),
    ],
)
def test_a_path_of_vllm_says_what_to_import(path: str, hint: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^No module named 'nanovllm\.\w.*: {hint}"):
        importlib.import_module(f"nanovllm.{path}")


def test_other_modules_are_missing_as_python_says() -> None:
    assert find_spec("nanovllm.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nanovllm\.nothing'$"):
        importlib.import_module("nanovllm.nothing")


@pytest.mark.parametrize("name", ["envs", "inputs"])
def test_a_module_of_vllm_may_be_asked_for(name: str) -> None:
    """As optional imports do; `from nanovllm import` swallows what an import of it raises."""
    assert find_spec(f"nanovllm.{name}") is None
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'nanovllm': "):
        exec(f"from nanovllm import {name}", {})


def test_what_a_hint_names_can_be_imported() -> None:
    for hint in MODULES.values():
        for found in re.finditer(r"from (nanovllm[\w.]*) import ((\w+)(, \w+)*)", hint):
            module = importlib.import_module(found[1])
            assert all(hasattr(module, name) for name in found[2].split(", ")), hint


@pytest.mark.parametrize("path", MODULES)
def test_no_hint_is_for_a_module_that_exists(path: str) -> None:
    name, _, inner = path.rpartition(".")
    assert not name or find_spec(f"nanovllm.{name}") is not None, "its parent is asked for first"
    assert not (ROOT / "nanovllm" / path.replace(".", "/")).exists()
    assert not (ROOT / "nanovllm" / f"{path.replace('.', '/')}.py").exists() and inner


def test_hints_name_pages_that_exist() -> None:
    tables = [
        table for module in (calls, modules, python, server) for table in vars(module).values()
    ]
    text = str([*tables, ENGINE, POOLING, SAMPLING])
    pages = set(re.findall(r"docs/\w+\.md", text))
    assert len(pages) > 5
    assert [page for page in pages if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("name", ["FlexibleArgumentParser", "random_uuid"])
def test_helpers_of_vllm_have_hints(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^cannot import name '{name}' from .*: use \w+\."):
        getattr(importlib.import_module("nanovllm.utils"), name)
    with pytest.raises(AttributeError, match="has no attribute 'anything'"):
        _ = importlib.import_module("nanovllm.utils").anything
